"""Choices: what a comparison is asked for, from the words of a command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from attn_exp.compare.render import FORMATS
from attn_exp.core.errors import UserError, nearest

# Earlier spellings of keys.
_EARLIER = {"experiment": "mlflow_experiment"}
# A difference that matters, unless told otherwise: what `equivalent` rules out.
MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to compare and how to show it; the keys of `python -m attn_exp.compare`, in its order.

    `fail_if_slower`, `margin` and `spread` are relative differences (0.03 is 3 %), `rows` the most rows to show.
    """

    sweep: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    history: bool = False
    published: str | None = None
    baseline: str | None = None
    by: tuple[str, ...] = ()
    where: str | None = None
    sort: str | None = None
    metric: str = "time_us"
    format: str | None = None
    out: str | None = None
    rows: int | None = None
    plots: str | None = None
    margin: float | None = None
    spread: float | None = None
    fail_if_slower: float | None = None
    anyway: bool = False
    folder: str = "multirun"
    uri: str | None = None
    mlflow_experiment: str = "attn_exp"


def choice_of(arguments: Sequence[str]) -> Choice:
    """What a command line asks for.

    Raises:
        UserError: a key or value that does not exist.
    """
    given: dict[str, object] = {}
    sweeps: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--fail-if-slower":
            if not words:
                raise UserError("--fail-if-slower needs a percentage: --fail-if-slower 3%")
            word = f"fail_if_slower={words.pop(0)}"
        key, equals, value = word.partition("=")
        key = "fail_if_slower" if key == "--fail-if-slower" else key
        if not equals:
            if word == "history":
                given["history"] = True
                continue
            if word.startswith("-") or "/" not in word:
                raise UserError(
                    f"'{word}' is not of the form key=value: {_near(word)}for example sweep={word.strip('-')}"
                )
            key, value = "sweep", word
        key = _EARLIER.get(key, key)
        if key not in _READERS:
            raise UserError(f"there is no key '{key}': {_near(key)}the keys are {', '.join(_READERS)}")
        if key == "sweep":
            sweeps += _list(key, value)
        elif key in given and key != "history":
            raise UserError(f"{key} is given twice: give it once")
        else:
            given[key] = _READERS[key](key, value)
    choice = Choice(**given | {"sweep": tuple(sweeps)})  # type: ignore[arg-type]
    _check(choice)
    return choice


def choice_from(keys: Mapping[str, Any]) -> Choice:
    """What a call from Python asks for: the same keys, values as text or as they are (`margin=0.03`, `by=["dtype"]`).

    Raises:
        UserError: a key or value that does not exist.
    """
    given: dict[str, Any] = {}
    for word, value in keys.items():
        key = _EARLIER.get(word, word)
        if key not in _READERS or key in ("sweep", "against", "format", "out", "rows", "plots"):
            raise UserError(f"there is no key '{key}': {_near(key)}the keys are {', '.join(_READERS)}")
        given[key] = _READERS[key](key, value) if isinstance(value, str) else value
        if _READERS[key] is _share and isinstance(value, (int, float)):
            given[key] = _share(key, f"{value:f}")
        elif isinstance(value, (list, tuple)):
            given[key] = tuple(map(str, value))
        elif isinstance(value, Path):
            given[key] = str(value)
    return Choice(**given)


def _check(choice: Choice) -> None:
    if not choice.sweep:
        raise UserError("there is nothing to compare: name a sweep with sweep=NAME")
    if choice.fail_if_slower is not None and not choice.against:
        raise UserError("--fail-if-slower compares two sweeps: say which with against=NAME")
    check_ways(choice, against=bool(choice.against))


def check_ways(choice: Choice, *, against: bool) -> None:
    """Raise UserError if a choice asks for two comparisons at once, or gives one what it has no use for."""
    ways = ["against"] * against + [name for name in ("history", "published") if getattr(choice, name)]
    if len(ways) > 1:
        raise UserError(f"{' and '.join(ways)} are different comparisons: leave one out")
    unused = {"history": ("baseline", "by"), "against": ("baseline", "by"), "published": ("baseline", "by")}
    for way in ways:
        for name in unused[way]:
            if getattr(choice, name):
                raise UserError(f"{name}= says nothing with {way}: leave it out")


def _near(key: str) -> str:
    return nearest(key.lstrip("-").replace("-", "_"), _READERS)


def _text(key: str, value: str) -> str:
    if not value:
        raise UserError(f"{key}= is empty: leave it out, or give a value")
    return value


def _list(key: str, value: str) -> tuple[str, ...]:
    return tuple(_text(key, part.strip()) for part in value.split(","))


def _truth(key: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise UserError(f"{key}={value} is neither true nor false")
    return value.lower() == "true"


def _share(key: str, value: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(%?)", value)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not match or not 0 < share < 1:
        raise UserError(f"{key}={value} is no percentage between 0 and 100: use {key}=3%")
    return share


def _count(key: str, value: str) -> int | None:
    if value == "all":
        return None
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"{key}={value} is no number of rows: use {key}=20 or {key}=all")
    return int(value)


def _format(key: str, value: str) -> str:
    if value not in FORMATS:
        raise UserError(f"format={value} is not known: {nearest(value, FORMATS)}the formats are {', '.join(FORMATS)}")
    return value


_READERS = {field.name: _text for field in fields(Choice)} | {
    "sweep": _list,
    "against": _list,
    "by": _list,
    "history": _truth,
    "anyway": _truth,
    "margin": _share,
    "spread": _share,
    "fail_if_slower": _share,
    "rows": _count,
    "format": _format,
}
