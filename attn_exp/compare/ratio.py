"""Ratios of two cells that were not measured side by side, and how far such ratios can be trusted.

Nothing here is the test of `attn_exp.core.paired_test`, which holds for interleaved rounds alone. A ratio's interval
combines both cells' own intervals over rounds with the spread between rows: how far two equal things lie apart because
they were measured at different moments. The constants are what was seen; `spread=` replaces them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from attn_exp.core.paired_test import MARGIN_FLOOR
from attn_exp.results.calibration import device_key
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.result import Result

# Twelve medians of one call, one after another on an H200 under its power cap, spread by 0.8 to 2.2 %.
POWER_CAPPED_SPREAD = 0.022
# Of 32 cells above 50 us measured by two programs minutes apart, the farthest pair (results/h200/sdpa_sweep).
SESSION_SPREAD = 0.022
# Three sweeps of 36 equal cells in turn on a CPU of 2 cores with other programs at work: from one sweep to the next
# half of the cells differed by more than 2.3 to 5.4 %, of which 1.0 to 5.4 % by what all of them had in common.
PROCESSOR_SPREAD = 0.05
PROCESSOR_SESSION_SPREAD = 0.10
# Two H200s of one host, the same call: 3.694 and 3.621 ms.
OTHER_GPU_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better one cell is than another (1.1: a tenth faster), with its 95 % interval.

    `spread` is the part of the interval that is not the cells' own: what two equal rows may differ by.
    """

    value: float
    low: float
    high: float
    spread: float

    @property
    def told(self) -> bool:
        """Whether the two can be told apart: the interval excludes 1, and the difference exceeds the spread."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Spreads:
    """The spreads to reckon with: each device's smallest meaningful difference, or one figure for all."""

    margins: Mapping[str, float]
    fixed: float | None = None

    def margin(self, result: Result) -> float:
        """The smallest difference that means something between rows of the result's device."""
        floor = PROCESSOR_SPREAD if result.device == "cpu" else MARGIN_FLOOR
        return max(floor, self.margins.get(device_key(dict(result.environment)), floor))

    def between_rows(self, one: Result, other: Result) -> float:
        """What two rows of one session may differ by though they are equal, as a relative difference.

        Two sweeps are two sessions, and two GPUs of one model are not one.
        """
        if self.fixed is not None:
            return self.fixed
        if one.sweep != other.sweep:
            return self.between_sessions(one, other)
        margin = max(self.margin(one), self.margin(other))
        if "power_capped" in one.flags or "power_capped" in other.flags:
            margin = max(margin, POWER_CAPPED_SPREAD)
        return math.hypot(margin, OTHER_GPU_SPREAD) if _other_gpu(one, other) else margin

    def between_sessions(self, one: Result, other: Result) -> float:
        """What the same cell may differ by from one session to another, with nothing to divide the session out."""
        if self.fixed is not None:
            return self.fixed
        known = PROCESSOR_SESSION_SPREAD if one.device == "cpu" else SESSION_SPREAD
        margin = max(self.margin(one), self.margin(other), known)
        return math.hypot(margin, OTHER_GPU_SPREAD) if _other_gpu(one, other) else margin

    def with_canaries(self, one: Result, other: Result, scatter: float) -> float:
        """The same once the session was divided out by canaries that scatter by so much."""
        return self.fixed if self.fixed is not None else max(self.margin(one), self.margin(other), scatter)


def gain(cell: Cell, over: Cell, metric: ChosenMetric) -> float | None:
    """The logarithm of how many times better `cell` is than `over`; None if either has no value."""
    if cell.value is None or over.value is None or cell.value <= 0 or over.value <= 0:
        return None
    log = math.log(cell.value / over.value)
    return log if metric.kind.higher_is_better else -log


def half_width(cell: Cell, over: Cell, spread: float) -> float:
    """Half the 95 % interval of a log ratio: both cells' own and the spread, independent of each other."""
    return math.hypot(cell.half or 0.0, over.half or 0.0, math.log1p(spread))


def ratio(cell: Cell, over: Cell, metric: ChosenMetric, spread: float) -> Ratio | None:
    """How many times better `cell` is than `over`, with its interval; None if either has no value."""
    log = gain(cell, over, metric)
    if log is None:
        return None
    half = half_width(cell, over, spread)
    return Ratio(math.exp(log), math.exp(log - half), math.exp(log + half), spread)


def p_value(log: float, half: float) -> float:
    """The two-sided probability of a log ratio so far from 0, if `half` is 1.96 of its standard deviations."""
    return 2 * NormalDist().cdf(-abs(log) / half * NormalDist().inv_cdf(0.975))


def _other_gpu(one: Result, other: Result) -> bool:
    return one.environment.get("gpu_uuid") != other.environment.get("gpu_uuid")
