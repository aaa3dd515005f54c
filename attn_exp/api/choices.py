"""Choices as Python writes them, as overrides of the command line: `batch=[1, 8]` is `batch=1,8`."""

from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from attn_exp.core.case import TYPED_DTYPES
from attn_exp.core.errors import UserError

# Keys whose value is a list. Of all others a list is several choices.
_LISTS = ("passes", "lengths", "kv_lengths", "columns", "stop_on", "timer.also", "isolation.variables", "profiler")
_SHORT = {f"torch.{name}": short for name, short in TYPED_DTYPES.items()}


def overrides_of(choices: Mapping[str, Any]) -> list[str]:
    """Return choices as overrides.

    A list is several values, one job each; a tuple is one value that is a list, as is a list for a key that takes one
    (`passes`, `lengths`). A mapping sets the keys inside: `model={"head_dim": 64}` is `model.head_dim=64`. Text is as
    typed in a command line, so that `backend="flash,math"` is two choices.

    Raises:
        UserError: a value cannot be written as an override.
    """
    overrides = []
    for key, value in choices.items():
        if isinstance(value, Mapping):
            overrides += overrides_of({f"{key}.{inside}": one for inside, one in value.items()})
        else:
            overrides.append(f"{key}={_values(key, value)}")
    return overrides


def _values(key: str, value: Any) -> str:
    several = isinstance(value, list) and (key not in _LISTS or any(isinstance(one, (list, tuple)) for one in value))
    if not several:
        return _text(key, value)
    if not value:
        raise UserError(f"{key}=[] has no value: leave {key} out, or give it one")
    return ",".join(_text(key, one) for one in value)


def _text(key: str, value: Any) -> str:
    """Return one value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        quoted = str(value).replace("'", "\\'")
        return f"'{quoted}'"
    if isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_text(key, one) for one in value)}]"
    if str(value) in _SHORT:
        return _SHORT[str(value)]
    raise UserError(f"{key}={value!r} is a {type(value).__name__}: give text, a number, a list or a mapping of these")
