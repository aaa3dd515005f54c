"""Judge measurements by published figures: ratio with interval, and verdict by fixed limits."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attn_exp.core.case.case import PASSES, Case
from attn_exp.core.case.fields import case_columns
from attn_exp.core.errors import UserError
from attn_exp.core.files import read_whole
from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.core.record.flags import flags_in
from attn_exp.reproduce.figures import CONDITIONS, Figure, Status
from attn_exp.results.cell import ChosenMetric, cells_of
from attn_exp.results.result import Result

# A figure is reproduced if the whole interval of our rate over theirs lies within 3 %, and contradicted if all of it
# lies beyond 10 %. Both hold on the log scale, and beyond the error of reading a chart.
REPRODUCED, CONTRADICTED = math.log1p(0.03), math.log1p(0.10)
# A burst on a rested GPU runs at the highest clock. Under load the lowest of results/h100/sdpa_sweep/one.tar.xz is 72 %
# of it, so that a figure of a sustained run is not contradicted by a burst that is faster by as much.
_FULL_CLOCK = -math.log(0.72)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One pass that was measured: `time_us` with the half-width of its logarithm's 95 % interval, or a status."""

    case: Case
    backend: str
    deterministic: bool
    direction: str
    status: str
    reason: str
    time_us: float | None
    half: float | None
    gpu: str
    conditions: Mapping[str, str]
    flags: tuple[str, ...]
    place: str


@dataclass(frozen=True)
class Judged:
    """A figure and our measurement of its configuration.

    `ratio` is our rate over theirs with its 95 % interval `low` to `high`: above 1 we are faster. `verdict` is None
    where none is given: nothing was measured, or on another GPU. `differs` says what else was different.
    """

    figure: Figure
    measured: Measured | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Status | None = None
    differs: str = ""

    @property
    def ours(self) -> float | None:
        """Our value in the figure's unit and counting; None if nothing was measured."""
        if self.ratio is None:
            return None
        value, unit = self.figure.value
        return value / self.ratio if unit == "us" else value * self.ratio

    @property
    def said(self) -> str:
        """The verdict, or why there is none."""
        if self.verdict is not None:
            return self.verdict.replace("_", " ")
        if self.figure.backend is None:
            return f"cannot be run: {self.figure.why}"
        if self.measured is None:
            return "not measured"
        if self.measured.time_us is None:
            return self.measured.status
        return "another GPU: no verdict"


def verdict_of(ratio: float, half: float | None, reading: float, regime: str) -> Status:
    """Return the verdict on our rate over a published one, that was read with a relative error of `reading`.

    `half` is the half-width of the ratio's logarithm; None if unknown, which is no interval at all. `regime` is ours.
    """
    distance = abs(math.log(ratio))
    if half is not None and distance + half <= REPRODUCED + reading:
        return "reproduced"
    beyond = distance - (half or 0.0) - CONTRADICTED - reading
    if beyond > 0:
        return "faster_at_full_clock" if ratio > 1 and regime == "burst" and beyond < _FULL_CLOCK else "contradicted"
    return "beside"


def judge(figures: Sequence[Figure], measured: Sequence[Measured]) -> list[Judged]:
    """Return each figure with our measurement of its configuration.

    The latest measurement on the figure's GPU and under its conditions counts, or the one that comes nearest to these.
    """
    by_case: dict[Any, list[Measured]] = {}
    for one in measured:
        by_case.setdefault(_key(one.case, one.backend, one.direction), []).append(one)
    return [
        _judged(figure, by_case.get(_key(figure.case, figure.backend or "", figure.direction), []))
        for figure in figures
    ]


def _key(case: Case, backend: str, direction: str) -> tuple[Any, ...]:
    # The layout is a condition; where a square mask starts is no part of the problem.
    return replace(case, layout="bhsd", align="bottom_right" if case.square else case.align), backend, direction


def _judged(figure: Figure, candidates: Sequence[Measured]) -> Judged:
    # The forward has no deterministic algorithm.
    fitting = [
        candidate
        for candidate in candidates
        if figure.direction == "forward" or candidate.deterministic == figure.deterministic
    ]
    if figure.backend is None or not fitting:
        return Judged(figure, None)
    # Of several that are equal, the latest: `max` returns the first.
    best = max(
        reversed(fitting),
        key=lambda one: (one.time_us is not None, same_gpu(figure, one.gpu), -len(_differing(figure, one))),
    )
    differs = "; ".join(_differing(figure, best))
    if best.time_us is None:
        return Judged(figure, best, differs=differs)
    ratio, half = figure.us / best.time_us, best.half
    low, high = (None, None) if half is None else (ratio * math.exp(-half), ratio * math.exp(half))
    verdict = None
    if same_gpu(figure, best.gpu):
        verdict = verdict_of(ratio, half, figure.source.reading, best.conditions.get("regime", "sustained"))
    return Judged(figure, best, ratio, low, high, verdict, differs)


def same_gpu(figure: Figure, device: str) -> bool:
    """Whether a device is the chip of a figure."""
    ours, theirs = datasheet_peak(device), figure.source.chip
    return ours is not None and theirs is not None and ours.name == theirs.name


def _differing(figure: Figure, measured: Measured) -> list[str]:
    """Return what was measured under another condition than the figure's, as far as both are known."""
    asked = {"layout": figure.case.layout} | dict(figure.settings)
    return [
        f"{name} {measured.conditions[name]}, not {asked[name]}"
        for name in CONDITIONS
        if name in asked and measured.conditions.get(name, asked[name]) != asked[name]
    ] + list(measured.flags)


def from_results(results: Iterable[Result]) -> list[Measured]:
    """Return the passes of a sweep's results."""
    plain = (one for one in results if one.case.workload is None and one.compile.mode == "none")
    found = []
    for cell in cells_of(sorted(plain, key=lambda one: one.finished_at), ChosenMetric(), turns=False):
        result, way = cell.result, cell.result.measuring
        found.append(
            Measured(
                case=result.case,
                backend=str(result.backend["name"]),
                deterministic=result.backend.get("deterministic") is True,
                direction=cell.direction,
                status=result.status,
                reason=result.reason or "",
                time_us=cell.value,
                half=cell.half,
                gpu=result.device_name,
                conditions={"layout": result.case.layout, "regime": way.regime, "l2": way.l2},
                flags=cell.flags,
                place=result.sweep,
            )
        )
    return found


def from_table(file: Path) -> list[Measured]:
    """Return the passes in a sweep's `table.csv`, which tells less than its records: rows that it cannot tell are none.

    Raises UserError if the file cannot be read, or is no such table.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(read_whole(file).decode("utf-8-sig"), newline="")))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file} cannot be read as CSV ({error}): give a sweep, or its table.csv") from error
    needed = {"backend", "status", "q_heads", "dtype", "forward/time_us"}
    if not rows or not needed <= set(rows[0]):
        raise UserError(f"{file} is no table.csv of a sweep: it lacks {', '.join(sorted(needed - set(*rows[:1])))}")
    return [one for row in rows for one in _from_row(row, file)]


def _from_row(row: Mapping[str, str | None], file: Path) -> list[Measured]:
    values = {name: row.get(name) or "" for name in row}
    if values.get("lengths") or values.get("workload") or values.get("compile", "none") != "none":
        return []
    try:
        case = Case(**{name: _typed(name, values[name]) for name in case_columns() if values.get(name)})
        times = {name: float(text) for name, text in values.items() if text and name.endswith("_us")}
    except (ValueError, TypeError, UserError):
        return []
    found = []
    for direction in PASSES:
        time_us, low, high = (times.get(f"{direction}/time{bound}_us") for bound in ("", "_low", "_high"))
        if f"{direction}/time_us" not in values:
            continue
        half = math.log(high / low) / 2 if low is not None and high is not None and 0 < low <= high else None
        found.append(
            Measured(
                case=case,
                backend=values["backend"],
                deterministic="deterministic=true" in values.get("label", ""),
                direction=direction,
                status=values["status"],
                reason=values.get("reason", ""),
                time_us=time_us if time_us and 0 < time_us < math.inf and values["status"] == "ok" else None,
                half=half,
                gpu=values.get("gpu", ""),
                conditions={name: values[name] for name in CONDITIONS if values.get(name)},
                flags=flags_in(tuple(values.get("flags", "").split()), {}, direction),
                place=str(file),
            )
        )
    return found


def _typed(name: str, text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if name == "softcap":
        return float(text)
    return int(text) if text.isdecimal() else text
