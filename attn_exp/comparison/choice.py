"""The options of a comparison, from a command line or from Python."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attn_exp.comparison import MARGIN, SHOWN
from attn_exp.core.errors import UserError, check_name, nearest
from attn_exp.core.options import Options, declared, folder_option, option, sweeps_option, uri_option
from attn_exp.core.sheet import FORMATS
from attn_exp.core.values import one_of, rows, share


@dataclass(frozen=True, kw_only=True)
class Choice(Options):
    """Reads the records of sweeps and says which backend is faster where, and by how much; nothing is measured.

    Differences that are too small to tell come with the command of the duel that would decide them.
    """

    sweep: tuple[str, ...] = sweeps_option(example="attn-exp compare first")
    against: tuple[str, ...] = option(
        "the earlier sweep or baseline to compare with; last: the last that shares a case", "SWEEP", default=()
    )
    history: bool = option("three or more sweeps in order of time", bare=True)
    baseline: str | None = option("the backend that gains are relative to", "BACKEND", shown="the best of each case")
    where: str | None = option(
        "which cells: where='causal and seq_len >= 4096 and backend in (flash, cudnn)'", "EXPRESSION"
    )
    by: tuple[str, ...] = option("group the means by these fields", "FIELD,...", default=())
    sort: str | None = option("sort the rows by a field; -FIELD for the largest first", "FIELD")
    show: str = option("what the table shows of a time: tflops, us or gb/s", "UNIT", default="auto", read=one_of(SHOWN))
    metric: str = option(
        "time_us, tflops, kernel_time_us, ...; forward/time_us for one pass", "NAME", default="time_us"
    )
    format: str | None = option(
        ", ".join(FORMATS), "FORMAT", shown="by the ending of out=, else table", read=one_of(FORMATS)
    )
    out: str | None = option("write the report into a file instead of printing it", "FILE")
    plots: Path | None = option("write the pictures into a folder, as SVG and PNG; HTML has them inside", "FOLDER")
    rows: int | None = option("how many rows to show", "N", default="all", read=rows)
    # Shares: 0.03 is 3 %.
    margin: float | None = option(
        "the difference that the verdict `equivalent` rules out", "PERCENT", shown=f"{100 * MARGIN:g}%", read=share
    )
    spread: float | None = option(
        "what equal rows may differ by", "PERCENT", shown="the doctor's margin for the device", read=share
    )
    fail_if_slower: float | None = option(
        "exit with 1 if a cell is slower by at least PERCENT, or has no result any more", "PERCENT", read=share
    )
    undecided: Literal["fail", "warn", "pass"] = option(
        "whether cells that may be slower by that much fail, warn or pass", "WHAT", default="warn"
    )
    save: str | None = option(
        "keep the sweep's records as a baseline of this name, in baselines/ beside folder=", "NAME"
    )
    replace: bool = option("begin the baseline of save= anew, without its earlier runs")
    settle: bool = option("run the duels that the comparison proposes, one after another")
    anyway: bool = option("compare sweeps of different devices or versions all the same", bare=True)
    folder: Path = folder_option()
    uri: str | None = uri_option()
    mlflow_experiment: str = option("the experiment in the MLflow store", "NAME", default="attn_exp")

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other."""
        if self.fail_if_slower is not None and not self.against:
            raise UserError("fail_if_slower= compares two sweeps: say which with against=NAME")
        if self.undecided != "warn" and self.fail_if_slower is None:
            raise UserError("undecided= is for a gate: add fail_if_slower=3%")
        check_ways(self, against=bool(self.against))
        if self.settle and (self.against or self.history):
            raise UserError(
                "settle=true measures backends of a sweep side by side on this machine: compare that sweep by itself"
            )
        if self.replace and self.save is None:
            raise UserError("replace=true begins a baseline anew: say which with save=NAME")
        if self.save is not None:
            check_name("save", self.save)
            if self.against or self.history or self.uri:
                raise UserError("save= keeps one sweep of a folder as a baseline: compare that sweep by itself")


# The Python API has arguments of its own for these, or does not need them.
_OF_THE_COMMAND = (
    "sweep", "against", "format", "out", "rows", "plots", "fail_if_slower", "undecided", "settle", "save", "replace",
)  # fmt: skip
_KEYS = {one.name: one for one in declared(Choice) if one.name not in _OF_THE_COMMAND}


def choice_from(keys: Mapping[str, Any]) -> Choice:
    """Return the choice for a call from Python; values are text or Python objects (`margin=0.03`, `by=["dtype"]`).

    Raises UserError if there is no such option, or its value is invalid.
    """
    given: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in _KEYS:
            raise UserError(f"there is no key '{key}': {nearest(key, _KEYS)}the keys are {', '.join(_KEYS)}")
        if isinstance(value, str) or (_KEYS[key].read is share and isinstance(value, (int, float))):
            value = _KEYS[key].parse(value)
        given[key] = tuple(map(str, value)) if isinstance(value, (list, tuple)) else value
    return Choice(**given)


def check_ways(choice: Choice, *, against: bool) -> None:
    """Raise UserError if a choice requests two comparisons at once, or options without effect."""
    if against and choice.history:
        raise UserError("against and history are different comparisons: leave one out")
    for name in ("baseline", "by") if against or choice.history else ():
        if getattr(choice, name):
            raise UserError(f"{name}= has no effect with {'against' if against else 'history'}: remove it")
