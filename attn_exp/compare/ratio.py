"""Ratios of two cells, and how far such ratios can be trusted.

Cells that were measured in turns (`Turns`) have the ratio of their rounds. The ratio of others is that of their values,
and its interval combines both cells' confidence intervals with the spread between rows: how much two equal measurements
differ because they ran at different times. The constants below were observed; `spread=` replaces them, and ignores
turns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_exp.core.stats.interval import Uncertainty, combined
from attn_exp.core.stats.paired import MARGIN_FLOOR
from attn_exp.results.calibration import device_key
from attn_exp.results.cell import Cell, ChosenMetric, Turns
from attn_exp.results.result import Result

# Twelve medians of the same call, measured consecutively on an H200 under its power cap, spread by 0.8 to 2.2 %.
POWER_CAPPED_SPREAD = 0.022
# The largest difference among 32 cells above 50 us, measured by two programs minutes apart (results/h200/sdpa_sweep).
SESSION_SPREAD = 0.022
# Three sweeps of 36 equal cells alternated on a 2-core CPU with other programs running. Half of the cells differed by
# more than 2.3 to 5.4 % between sweeps, of which 1.0 to 5.4 % was common to all cells.
PROCESSOR_SPREAD = 0.05
# Between sweeps, and between rows of one sweep while other programs keep the processors busy. A GPU's calls are timed
# by the GPU, which a busy host does not disturb.
PROCESSOR_SESSION_SPREAD = 0.10
# Two H200s of one host measured the same call at 3.694 and 3.621 ms.
OTHER_GPU_SPREAD = 0.02
# The instrument's floor: no number of rounds tells two calls that were measured in turns apart by less.
TURNS_FLOOR = 0.001


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better one cell is than another (1.1: 10 % better), with its 95 % confidence interval.

    `spread` is the part of the interval that is not the cells' own: how much two equal rows may differ. `p` is
    two-sided, for the ratio being 1, and for this pair of cells only.
    """

    value: float
    low: float
    high: float
    spread: float
    p: float


@dataclass(frozen=True)
class Spreads:
    """How much equal rows may differ: the smallest meaningful difference per device, or one value for all."""

    margins: Mapping[str, float]
    fixed: float | None = None

    def margin(self, result: Result) -> float:
        """Return the smallest meaningful difference between rows of the result's device."""
        floor = PROCESSOR_SPREAD if result.device == "cpu" else MARGIN_FLOOR
        return max(floor, self.margins.get(device_key(dict(result.environment)), floor))

    def between_rows(self, one: Result, other: Result) -> float:
        """Return how much two equal rows may differ, as a relative difference.

        Two sweeps are two sessions, and two GPUs of one model are different devices.
        """
        if self.fixed is not None:
            return self.fixed
        if one.sweep != other.sweep:
            return self.between_sessions(one, other)
        margin = max(self.margin(one), self.margin(other))
        if "power_capped" in one.flags or "power_capped" in other.flags:
            margin = max(margin, POWER_CAPPED_SPREAD)
        if one.device == "cpu" and ("busy_host" in one.flags or "busy_host" in other.flags):
            margin = max(margin, PROCESSOR_SESSION_SPREAD)
        return math.hypot(margin, OTHER_GPU_SPREAD) if _other_gpu(one, other) else margin

    def between_sessions(self, one: Result, other: Result) -> float:
        """Return how much equal cells of two sessions may differ, without canaries to correct for the session."""
        if self.fixed is not None:
            return self.fixed
        known = PROCESSOR_SESSION_SPREAD if one.device == "cpu" else SESSION_SPREAD
        margin = max(self.margin(one), self.margin(other), known)
        return math.hypot(margin, OTHER_GPU_SPREAD) if _other_gpu(one, other) else margin

    def with_canaries(self, one: Result, other: Result, scatter: float) -> float:
        """Return how much equal cells of two sessions may differ after correction by canaries of this scatter."""
        return self.fixed if self.fixed is not None else max(self.margin(one), self.margin(other), scatter)


def geometric_mean(logs: Sequence[float]) -> float:
    """Return the geometric mean of values whose logarithms are given."""
    return math.exp(math.fsum(logs) / len(logs))


def gain(cell: Cell, over: Cell, metric: ChosenMetric) -> float | None:
    """Return the logarithm of how many times better `cell` is than `over`, or None without two values.

    It is from their rounds if the cells were measured in turns, else from their values.
    """
    if cell.value is None or over.value is None or cell.value <= 0 or over.value <= 0:
        return None
    turns = _both_turns(cell, over)
    log = math.log(turns[0].value / turns[1].value if turns else cell.value / over.value)
    return log if metric.kind.higher_is_better else -log


def doubts(cell: Cell, over: Cell, spread: float) -> tuple[list[Uncertainty], float]:
    """Return the uncertainties of a log ratio that are the two cells' own, and the spread.

    Of cells that were measured in turns these are the links that only one of their chains has, and the floor.
    """
    if (turns := _both_turns(cell, over)) is None:
        return [cell.uncertainty, over.uncertainty], spread
    one, other = (each.links for each in turns)
    return [(one.get(job) or other[job]) for job in sorted(one.keys() ^ other.keys())], TURNS_FLOOR


def uncertainty(cell: Cell, over: Cell, spread: float) -> Uncertainty:
    """Return the uncertainty of a log ratio: both cells' and the spread, independent."""
    own, spread = doubts(cell, over, spread)
    return combined([*own, Uncertainty(math.log1p(spread))])


def ratio(cell: Cell, over: Cell, metric: ChosenMetric, spread: float) -> Ratio | None:
    """Return how many times better `cell` is than `over`, with its interval, or None without two values."""
    log = gain(cell, over, metric)
    if log is None:
        return None
    own, spread = doubts(cell, over, spread)
    doubt = combined([*own, Uncertainty(math.log1p(spread))])
    return Ratio(math.exp(log), math.exp(log - doubt.half), math.exp(log + doubt.half), spread, doubt.p_value(log))


def times_text(value: float) -> str:
    """Return how many times with three digits: `1.59`."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _both_turns(cell: Cell, over: Cell) -> tuple[Turns, Turns] | None:
    """Return the turns of two cells whose chains of bases end at one job; None of all others."""
    one, other = cell.turns, over.turns
    return (one, other) if one is not None and other is not None and one.end == other.end else None


def _other_gpu(one: Result, other: Result) -> bool:
    return one.environment.get("gpu_uuid") != other.environment.get("gpu_uuid")
