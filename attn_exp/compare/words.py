"""Words: options of a backend as one would type them."""

from collections.abc import Mapping
from typing import Any

# Names for no compilation, as a request may spell it.
_NOT_COMPILED = (None, False, "", "none", "off")


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options inside of options under dotted names."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def word(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(word, value))}]"
    return str(value)


def compile_mode(compiled: Any) -> str | None:
    """The mode that a request compiles in, None if it does not; `compiled` is an object, a tree or a name."""
    mode = compiled.get("mode") if isinstance(compiled, Mapping) else getattr(compiled, "mode", compiled)
    return None if mode in _NOT_COMPILED else "default" if mode is True else str(mode)
