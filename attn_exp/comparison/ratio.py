"""Ratios of two cells, and how far such ratios can be trusted.

Cells that were measured in turns (`Turns`) have the ratio of their rounds. The ratio of others is that of their values,
and its interval combines both cells' confidence intervals with the spread between rows: how much two equal measurements
differ because they ran at different times. The constants below were observed; `spread=` replaces them, and ignores
turns.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_exp.comparison.join import method_key
from attn_exp.core.stats.interval import Uncertainty, combined
from attn_exp.core.stats.paired import MARGIN_FLOOR
from attn_exp.results.calibration import device_key
from attn_exp.results.cell import Cell, ChosenMetric, Turns, kernel_identity
from attn_exp.results.result import Result

# Twelve medians of the same call, measured consecutively on an H200 under its power cap, spread by 0.8 to 2.2 %.
POWER_CAPPED_SPREAD = 0.022
# The largest difference among 32 cells above 50 us, measured by two programs minutes apart on an H200, in the calmest
# of four runs of method 1 (results/h200/sdpa_sweep at b44b987c); the others had 3.2 to 7.4 %. Method 5 is steadier:
# in bursts cuDNN's rows differ by 0.6 % at most between sweeps of one H200 (results/h200/same_kernel).
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
    """How much equal rows may differ: by device, or one value for all; of two sweeps as rows of one kernel do."""

    margins: Mapping[str, float]
    fixed: float | None = None
    results: Sequence[Result] = ()
    _known: dict[frozenset[str], float | None] = field(default_factory=dict)

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
        """Return how much equal cells of two sessions may differ."""
        if self.fixed is not None:
            return self.fixed
        if (seen := self._of_one_kernel(one, other)) is not None:
            return seen
        known = PROCESSOR_SESSION_SPREAD if one.device == "cpu" else SESSION_SPREAD
        margin = max(self.margin(one), self.margin(other), known)
        return math.hypot(margin, OTHER_GPU_SPREAD) if _other_gpu(one, other) else margin

    def _of_one_kernel(self, one: Result, other: Result) -> float | None:
        """Return what 95 % of rows of one kernel under two names differ by between sweeps, at least 1 %, or None."""
        both = frozenset((one.sweep, other.sweep))
        if both not in self._known:
            rows: dict[Any, list[Result]] = defaultdict(list)
            for result in self.results if len(both) == 2 else ():
                for direction in result.kernels if result.sweep in both else ():
                    ran = kernel_identity(result, direction)
                    if ran is not None and f"{direction}/time_us" in result.metrics:
                        rows[result.case, method_key(result), direction, ran].append(result)
            logs = sorted(
                abs(math.log(a.metrics[f"{key[2]}/time_us"] / b.metrics[f"{key[2]}/time_us"]))
                for key, results in rows.items()
                for a, b in itertools.combinations(results, 2)
                if a.sweep != b.sweep and a.label != b.label
            )
            at = math.ceil(0.95 * len(logs)) - 1
            self._known[both] = max(MARGIN_FLOOR, math.expm1(logs[at])) if logs else None
        return self._known[both]


def geometric_mean(logs: Sequence[float]) -> float:
    """Return the geometric mean of values whose logarithms are given."""
    return math.exp(math.fsum(logs) / len(logs))


def gain(cell: Cell, over: Cell, metric: ChosenMetric) -> float | None:
    """Return the logarithm of how many times better `cell` is than `over`, or None without two values.

    Two zeros are equal. It is from their rounds if the cells were measured in turns, else from their values.
    """
    if cell.value == over.value == 0:
        return 0.0
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


def ratio(cells: Sequence[Cell], over: Sequence[Cell], metric: ChosenMetric, spreads: Spreads) -> Ratio | None:
    """Return how many times better a rival is than another one of its case and pass, or None without two values.

    A rival is a cell, or several of one kernel: then it is the geometric mean over all pairs, with their mean interval,
    since pairs of one kernel are not independent.
    """
    kind = metric.kind
    # Equal calls take the same memory and make the same errors.
    varies = kind.follows_clock or kind.has_time_interval or kind.of_power
    logs, own, widest = list[float](), list[Uncertainty](), 0.0
    for cell, other in itertools.product(cells, over):
        log = gain(cell, other, metric)
        if log is None:
            return None
        parts, spread = doubts(cell, other, spreads.between_rows(cell.result, other.result) if varies else 0.0)
        logs.append(log)
        own.append(combined([*parts, Uncertainty(math.log1p(spread))]))
        widest = max(widest, spread)
    if not logs:
        return None
    log = math.fsum(logs) / len(logs)
    doubt = Uncertainty(math.fsum(one.half for one in own) / len(own), min(one.degrees for one in own))
    return Ratio(math.exp(log), math.exp(log - doubt.half), math.exp(log + doubt.half), widest, doubt.p_value(log))


def times_text(value: float) -> str:
    """Return how many times with three digits: `1.59`."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _both_turns(cell: Cell, over: Cell) -> tuple[Turns, Turns] | None:
    """Return the turns of two cells whose chains of bases end at one job; None of all others."""
    one, other = cell.turns, over.turns
    return (one, other) if one is not None and other is not None and one.end == other.end else None


def _other_gpu(one: Result, other: Result) -> bool:
    return one.environment.get("gpu_uuid") != other.environment.get("gpu_uuid")
