"""The options of a comparison, from a command line or from Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from attn_exp.comparison import SHOWN, UNDECIDED
from attn_exp.core.errors import UserError, check_name, nearest
from attn_exp.core.sheet import FORMATS
from attn_exp.core.values import Reader, names, one_of, rows, share, text, truth


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options of `attn-exp compare`: what to compare and how to show it.

    `fail_if_slower`, `margin` and `spread` are relative differences (0.03 is 3 %), `rows` the maximum number of rows.
    """

    sweep: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    history: bool = False
    baseline: str | None = None
    by: tuple[str, ...] = ()
    where: str | None = None
    sort: str | None = None
    metric: str = "time_us"
    show: str = "auto"
    format: str | None = None
    out: str | None = None
    rows: int | None = None
    plots: str | None = None
    margin: float | None = None
    spread: float | None = None
    fail_if_slower: float | None = None
    undecided: str = "warn"
    anyway: bool = False
    settle: bool = False
    save: str | None = None
    replace: bool = False
    folder: str = "multirun"
    uri: str | None = None
    mlflow_experiment: str = "attn_exp"


# How the text of each option becomes its value, for the command and the Python API.
READERS: dict[str, Reader] = {field.name: text for field in fields(Choice)} | {
    **dict.fromkeys(("sweep", "against", "by"), names),
    **dict.fromkeys(("history", "anyway", "settle", "replace"), truth),
    **dict.fromkeys(("margin", "spread", "fail_if_slower"), share),
    "rows": rows,
    "format": one_of(tuple(FORMATS)),
    "show": one_of(SHOWN),
    "undecided": one_of(UNDECIDED),
}
# The Python API has arguments of its own for these, or does not need them.
_OF_THE_COMMAND = (
    "sweep",
    "against",
    "format",
    "out",
    "rows",
    "plots",
    "fail_if_slower",
    "undecided",
    "settle",
    "save",
    "replace",
)


def choice_for(sweeps: Sequence[str], given: Mapping[str, Any]) -> Choice:
    """Return the choice for the sweeps and options of a command line.

    Raises:
        UserError: options contradict each other.
    """
    choice = Choice(**{**given, "sweep": tuple(sweeps)})
    if choice.fail_if_slower is not None and not choice.against:
        raise UserError("fail_if_slower= compares two sweeps: say which with against=NAME")
    if choice.undecided != "warn" and choice.fail_if_slower is None:
        raise UserError("undecided= is for a gate: add fail_if_slower=3%")
    check_ways(choice, against=bool(choice.against))
    if choice.settle and (choice.against or choice.history):
        raise UserError(
            "settle=true measures backends of a sweep side by side on this machine: compare that sweep by itself"
        )
    if choice.replace and choice.save is None:
        raise UserError("replace=true begins a baseline anew: say which with save=NAME")
    if choice.save is not None:
        check_name("save", choice.save)
        if choice.against or choice.history or choice.uri:
            raise UserError("save= keeps one sweep of a folder as a baseline: compare that sweep by itself")
    return choice


def choice_from(keys: Mapping[str, Any]) -> Choice:
    """Return the choice for a call from Python; values are text or Python objects (`margin=0.03`, `by=["dtype"]`).

    Raises:
        UserError: there is no such option, or its value is invalid.
    """
    given: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in READERS or key in _OF_THE_COMMAND:
            known = [name for name in READERS if name not in _OF_THE_COMMAND]
            raise UserError(f"there is no key '{key}': {nearest(key, known)}the keys are {', '.join(known)}")
        given[key] = READERS[key](key, value) if isinstance(value, str) else value
        if READERS[key] is share and isinstance(value, (int, float)):
            given[key] = share(key, f"{value:f}")
        elif isinstance(value, (list, tuple)):
            given[key] = tuple(map(str, value))
        elif isinstance(value, Path):
            given[key] = str(value)
    return Choice(**given)


def check_ways(choice: Choice, *, against: bool) -> None:
    """Raise UserError if a choice requests two comparisons at once, or options without effect."""
    ways = ["against"] * against + ["history"] * choice.history
    if len(ways) > 1:
        raise UserError(f"{' and '.join(ways)} are different comparisons: leave one out")
    unused = {"history": ("baseline", "by"), "against": ("baseline", "by")}
    for way in ways:
        for name in unused[way]:
            if getattr(choice, name):
                raise UserError(f"{name}= has no effect with {way}: remove it")
