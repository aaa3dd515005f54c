"""Convert text of a command line, or values of a Python call; a mistake becomes one sentence."""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError, nearest

# Takes the option's name and the text given.
Reader = Callable[[str, str], Any]


def text(key: str, value: str) -> str:
    """Return the text itself. Raises UserError where it is empty."""
    if not value:
        raise UserError(f"{key}= is empty: leave it out, or give a value")
    return value


def names(key: str, value: str) -> tuple[str, ...]:
    """Return the parts between commas. Raises UserError where one is empty."""
    return tuple(text(key, part.strip()) for part in value.split(","))


def path(key: str, value: str) -> Path:
    """Return the text as a path. Raises UserError where it is empty."""
    return Path(text(key, value))


def truth(key: str, value: str) -> bool:
    """Return whether the text is `true`. Raises UserError unless it is `true` or `false`."""
    if value.lower() not in ("true", "false"):
        near = nearest(value.lower(), ("true", "false"))
        raise UserError(f"{key}={value} is neither true nor false: {near}write one of the two")
    return value.lower() == "true"


def share(key: str, value: str | float) -> float:
    """Return a relative difference: 0.03 for `3%` or `0.03`. Raises UserError outside of 0 to 100 %."""
    value = value if isinstance(value, str) else f"{value:f}"
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(%?)", value)
    relative = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not match or not 0 < relative < 1:
        raise UserError(f"{key}={value} is no percentage between 0 and 100: use {key}=3%")
    return relative


def rows(key: str, value: str) -> int | None:
    """Return a number of rows, None for `all`. Raises UserError for anything else."""
    if value == "all":
        return None
    count = _whole(value)
    if count is None or count < 1:
        raise UserError(f"{key}={value} is no number of rows: use {key}=20 or {key}=all")
    return count


def port(key: str, value: str) -> int:
    """Return a port's number. Raises UserError for anything else."""
    number = _whole(value)
    if number is None or not 0 < number < 65536:
        raise UserError(f"{key}={value} is no port: use a number from 1 to 65535, for example {key}=5001")
    return number


def _whole(value: str) -> int | None:
    """Return a whole number of up to 15 digits; Python converts no more than 4,300."""
    return int(value) if value.isdecimal() and len(value) <= 15 else None


def one_of(choices: Collection[str]) -> Reader:
    """Return a reader that takes one of these words."""

    def read(key: str, value: str) -> str:
        if value not in choices:
            raise UserError(f"{key}={value} is not known: {nearest(value, choices)}choose one of {', '.join(choices)}")
        return value

    return read
