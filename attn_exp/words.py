"""Words: options of a backend as one would type them."""

from collections.abc import Mapping
from typing import Any


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
