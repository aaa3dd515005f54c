"""Cells: one pass of one result, with the value of the metric that is compared."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from attn_exp.core.case.case import HALVES, PASSES
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.record.metrics import METRICS, Metric, metric_named
from attn_exp.core.stats.interval import Uncertainty
from attn_exp.core.text import SHORT
from attn_exp.results.result import Result

_METRICS_SHOWN = 12
# A value with a wider interval, relative to it, was not measured well enough to be compared.
_WIDEST_COMPARED = 0.25
# Nothing is known of a value with such a half-width of its logarithm, and ratios of two such still are numbers.
_WIDEST = 100.0
# Names of C++ carry their template arguments, and those of libraries shape and architecture. A plain name, as Triton
# gives to kernels, is also that of the same function with other tiles.
_TELLING = re.compile(r"\W|cudnn|cutlass|nvjet|sm\d+_|_sm\d+|^Mem(set|cpy)")
# The operators of PyTorch's CPU backends that compute attention as a whole; their wrapper has none of these names.
_ATTENTION = re.compile(r"aten::_\w*attention\w*")


@dataclass(frozen=True)
class ChosenMetric:
    """The metric that is compared: its name without the pass, in one pass or (None) in all."""

    name: str = "time_us"
    direction: str | None = None

    @property
    def kind(self) -> Metric:
        """The registered metric: whether higher is better, whether it follows the clock, its column header."""
        return metric_named(self.name)

    @property
    def settled_by_duels(self) -> bool:
        """Whether a duel, which compares times, tells which of two backends is better by it."""
        return self.kind.has_time_interval and not self.kind.of_power

    @property
    def follows_time(self) -> bool:
        """Whether it is the ranking time, or a rate that follows from it alone."""
        return self.settled_by_duels and self.kind.follows_clock

    def __str__(self) -> str:
        return f"{self.direction}/{self.name}" if self.direction else self.name


@dataclass(frozen=True, slots=True)
class Turns:
    """How a cell that was measured in turns with others compares with the job at which its chain of bases ends.

    `end` is that job's sweep and name, `value` the metric's value there times what the chain's ratios say, and `links`
    the uncertainty of each ratio by the name of the job that it is of.
    """

    end: tuple[str, str]
    value: float
    links: Mapping[str, Uncertainty]


@dataclass(frozen=True, slots=True)
class Cell:
    """One pass of one result.

    `value` is the metric's value, or None if the result is not ok or lacks the metric. `half` is the half-width of the
    95 % confidence interval of its logarithm, with which ratios are computed; None without an interval. `rounds` are
    the rounds that it is from, None if the record does not say. `turns` are None unless the metric follows from the
    time alone, and the chain of bases has an end with a value.
    """

    result: Result
    direction: str
    value: float | None
    half: float | None
    rounds: float | None = None
    turns: Turns | None = None

    @property
    def uncertainty(self) -> Uncertainty:
        """The interval of the value's logarithm, with the degrees of freedom of its rounds."""
        degrees = self.rounds - 1 if self.rounds is not None and self.rounds >= 2 else math.inf
        return Uncertainty(self.half or 0.0, degrees)

    @property
    def half_width(self) -> float | None:
        """Return the relative half-width, (high - low) / 2 / value, as sweeps' tables show it: 0.01 is ±1 %."""
        return None if self.half is None else math.sinh(self.half)

    @property
    def compared(self) -> bool:
        """Whether it has a value that was measured well enough to be compared."""
        return self.value is not None and (self.half_width or 0.0) <= _WIDEST_COMPARED

    @property
    def flags(self) -> tuple[str, ...]:
        """The result's flags without those that only another pass has."""
        return self.result.flags_in(self.direction)

    @property
    def short(self) -> str:
        """`fwd`, `bwd` or `step`."""
        return SHORT.get(self.direction, self.direction)


def passes_shown(results: Iterable[Result]) -> list[str]:
    """Return the passes of a table: forward and backward, and what else was measured."""
    measured = {name for result in results for name in result.measuring.passes}
    return [name for name in PASSES if name in HALVES or name in measured]


def metric_of(word: str, results: Iterable[Result]) -> ChosenMetric:
    """Return the metric that the user typed: `tflops`, or `backward/tflops` for one pass only.

    The words that a name begins with are enough if no other name begins with them: `joules`. Raises UserError if no
    result has it. The message suggests the nearest name.
    """
    direction, slash, name = word.rpartition("/")
    names = metric_names(results)
    longer = [full for full in names if name and full.startswith(f"{name}_")]
    if name not in names and len(longer) == 1:
        name = longer[0]
    metric = ChosenMetric(name, direction if slash else None)
    if name not in names or (slash and direction not in PASSES):
        if not names:
            raise UserError("no record is ok, so there is nothing to compare: see table.txt in the sweep's folder")
        absent = [full for full in METRICS if full == name or (name and full.startswith(f"{name}_"))]
        if absent and not longer and name not in names:
            raise UserError(f"no row has {' or '.join(absent)}")
        near = nearest(name, names)
        first = [*(usual for usual in ("time_us", "tflops") if usual in names), *sorted(names - {"time_us", "tflops"})]
        choices = f"the metrics are {', '.join(first[:_METRICS_SHOWN])}, ...; table.csv has all"
        raise UserError(f"there is no metric '{word}': {near}{choices}")
    return metric


def metric_names(results: Iterable[Result]) -> set[str]:
    """Return the names of all metrics of all results, without the pass."""
    names: set[str] = set()
    for result in results:
        names.update(result.metrics)
    return {name.partition("/")[2] for name in names}


def cells_of(results: Sequence[Result], metric: ChosenMetric, *, turns: bool = True) -> list[Cell]:
    """Return one cell for each result and each pass that its request asked for, without `turns` all as if alone."""
    cells = []
    # Sweeps have unique names here, and a job's name is that of its folder.
    jobs = {(result.sweep, result.job): result for result in results} if turns and metric.follows_time else {}
    for result in results:
        for direction in result.measuring.passes:
            if metric.direction in (None, direction):
                value = _value(result, direction, metric)
                half = _half(result, direction, metric.kind) if value is not None else None
                rounds = result.metrics.get(f"{direction}/rounds")
                chain = _turns(result, direction, metric, jobs) if value is not None and jobs else None
                cells.append(Cell(result, direction, value, half, rounds, chain))
    return cells


def _value(result: Result, direction: str, metric: ChosenMetric) -> float | None:
    value = result.metrics.get(f"{direction}/{metric.name}") if result.status == "ok" else None
    # A ratio to zero is undefined; an error of zero is a valid value.
    return value if value is not None and (value > 0 or not metric.kind.follows_clock) else None


def _turns(
    result: Result, direction: str, metric: ChosenMetric, jobs: Mapping[tuple[str, str], Result]
) -> Turns | None:
    """Follow the chain of bases from a result to a job that has no other base; None if it is broken.

    A base that was measured again after the row that names it is none.
    """
    log, links, at = 0.0, dict[str, Uncertainty](), jobs.get((result.sweep, result.job))
    while at is not None and at.job not in links:
        turn = at.paired.get(direction)
        base = None if turn is None or turn.base == at.job else jobs.get((at.sweep, turn.base))
        if turn is None or turn.base == at.job or (base is not None and base.started_at > at.finished_at):
            value = _value(at, direction, metric)
            if value is None or abs(log) > _WIDEST:
                return None
            better = -log if metric.kind.higher_is_better else log
            return Turns((at.sweep, at.job), value * math.exp(better), links)
        if turn.rounds < 2:
            return None
        links[at.job] = Uncertainty(min(turn.half, _WIDEST), turn.rounds - 1)
        log += turn.log_ratio
        at = base
    return None


def _half(result: Result, direction: str, kind: Metric) -> float | None:
    """Return the half-width of the logarithm's interval: the time's, that of the power, or both; None if unknown."""
    parts = [_time_half(result, direction)] if kind.has_time_interval else []
    if kind.of_power:
        error = result.metrics.get(f"{direction}/power_error")
        parts.append(None if error is None else math.log1p(error))
    present = [part for part in parts if part is not None]
    return sum(present) if present and len(present) == len(parts) else None


def _time_half(result: Result, direction: str) -> float | None:
    low, high = (result.metrics.get(f"{direction}/time_{bound}_us") for bound in ("low", "high"))
    if low is None or high is None or not 0 < low <= high:
        return None
    return min((math.log(high) - math.log(low)) / 2, _WIDEST)


def attends(name: str) -> bool:
    """Return whether an operator of a CPU computes attention as a whole."""
    return _ATTENTION.fullmatch(name) is not None


def kernel_identity(result: Result, direction: str) -> frozenset[tuple[str, int]] | None:
    """Return what identifies the kernels of a pass: their names, and how often a call launches each.

    None if the names do not identify them, or if they are unknown. On a CPU it is all operators, if one of them
    computes attention as a whole. A step that was not measured runs the kernels of both halves.
    """
    if result.status != "ok":
        return None
    halves = HALVES if direction == "step" and direction not in result.kernels else (direction,)
    each = [_identity(result.kernels.get(half, ()), result.launches.get(half, ()), result.device) for half in halves]
    return None if None in each else frozenset().union(*filter(None, each))


# Each result of a case is compared with each other one, and thousands have the same kernels.
@lru_cache(1 << 12)
def _identity(kernels: tuple[str, ...], launches: tuple[int, ...], device: str) -> frozenset[tuple[str, int]] | None:
    telling = map(attends, kernels) if device == "cpu" else map(_TELLING.search, kernels)
    enough = any(telling) if device == "cpu" else kernels and all(telling)
    return frozenset(zip(kernels, launches, strict=True)) if enough else None


def same_kernel(first: Result, second: Result, direction: str) -> bool:
    """Return whether two results of one case ran the same kernels in a pass, as far as their names tell."""
    kernels = kernel_identity(first, direction)
    return kernels is not None and kernels == kernel_identity(second, direction)
