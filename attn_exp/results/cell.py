"""Cells: one pass of one result, with the value of the metric that is compared."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attn_exp.core.case import HALVES, PASSES
from attn_exp.core.errors import UserError, nearest_meaning
from attn_exp.core.interval import Uncertainty
from attn_exp.core.metrics import METRICS, Metric, metric_named
from attn_exp.core.text import SHORT
from attn_exp.results.result import Result

_METRICS_SHOWN = 12
_UNITS = ("us", "s", "bytes", "mhz", "w")
# What programs and papers call a metric.
_CALLED = {
    **dict.fromkeys(("latency", "runtime", "duration", "speed", "ms", "time"), "time_us"),
    **dict.fromkeys(("throughput", "performance"), "tflops"),
    **dict.fromkeys(("memory", "vram"), "peak_memory_bytes"),
    "energy": "joules_per_call",
    "bandwidth": "gb_per_s",
    "accuracy": "error_out",
}
# Nothing is known of a value with such a half-width of its logarithm, and ratios of two such still are numbers.
_WIDEST = 100.0


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

    def __str__(self) -> str:
        return f"{self.direction}/{self.name}" if self.direction else self.name


@dataclass(frozen=True, slots=True)
class Cell:
    """One pass of one result.

    `value` is the metric's value, or None if the result is not ok or lacks the metric. `half` is the half-width of the
    95 % confidence interval of its logarithm, with which ratios are computed, or None if it has no interval; `rounds`
    are the rounds that it is from, None where the record does not say.
    """

    result: Result
    direction: str
    value: float | None
    half: float | None
    rounds: float | None = None

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

    The words that a name begins with are enough if no other name begins with them: `joules`.

    Raises:
        UserError: no result has it. The message suggests the nearest name.
    """
    direction, slash, name = word.rpartition("/")
    names = metric_names(results)
    longer = [known for known in names if name and known.startswith(f"{name}_")]
    if name not in names and len(longer) == 1:
        name = longer[0]
    metric = ChosenMetric(name, direction if slash else None)
    if name not in names or (slash and direction not in PASSES):
        if not names:
            raise UserError("no record is ok, so there is nothing to compare: see table.txt in the sweep's folder")
        absent = [known for known in METRICS if known == name or (name and known.startswith(f"{name}_"))]
        if absent and not longer and name not in names:
            raise UserError(f"no row has {' or '.join(absent)}: docs/metrics.md says what it needs")
        near = nearest_meaning(name, metric_words(names))
        first = [*(one for one in ("time_us", "tflops") if one in names), *sorted(names - {"time_us", "tflops"})]
        known = f"the metrics are {', '.join(first[:_METRICS_SHOWN])}, ...; docs/metrics.md lists all"
        raise UserError(f"there is no metric '{word}': {near}{known}")
    return metric


def metric_words(names: Iterable[str]) -> dict[str, str]:
    """Return the words that may be meant for one of these names: itself, without its unit, and what others call it."""
    there = set(names)
    without_unit = {name.rpartition("_")[0]: name for name in sorted(there) if name.rpartition("_")[2] in _UNITS}
    return {
        **without_unit,
        **{one: name for one, name in _CALLED.items() if name in there},
        **{one: one for one in there},
    }


def metric_names(results: Iterable[Result]) -> set[str]:
    """Return the names of all metrics of all results, without the pass."""
    names: set[str] = set()
    for result in results:
        names.update(result.metrics)
    return {name.partition("/")[2] for name in names}


def cells_of(results: Sequence[Result], metric: ChosenMetric) -> list[Cell]:
    """Return one cell for each result and each pass that its request asked for."""
    cells = []
    for result in results:
        for direction in result.measuring.passes:
            if metric.direction in (None, direction):
                value = result.metrics.get(f"{direction}/{metric.name}") if result.status == "ok" else None
                # A ratio to zero is undefined; an error of zero is a valid value.
                usable = value is not None and (value > 0 or not metric.kind.follows_clock)
                half = _half(result, direction, metric.kind) if usable else None
                rounds = result.metrics.get(f"{direction}/rounds")
                cells.append(Cell(result, direction, value if usable else None, half, rounds))
    return cells


def _half(result: Result, direction: str, kind: Metric) -> float | None:
    """Return the half-width of the logarithm's interval: the time's, that of the power, or both; None if unknown."""
    parts = [_time_half(result, direction)] if kind.has_time_interval else []
    if kind.of_power:
        error = result.metrics.get(f"{direction}/power_error")
        parts.append(None if error is None else math.log1p(error))
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _time_half(result: Result, direction: str) -> float | None:
    low, high = (result.metrics.get(f"{direction}/time_{bound}_us") for bound in ("low", "high"))
    if low is None or high is None or not 0 < low <= high:
        return None
    return min((math.log(high) - math.log(low)) / 2, _WIDEST)
