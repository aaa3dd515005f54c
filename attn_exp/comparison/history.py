"""History: each cell over three or more sweeps, where its level changed, and what else changed at that time."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from attn_exp.comparison.columns import NAMES, case_pairs, row_sheet
from attn_exp.comparison.comparison import Comparison, case_order
from attn_exp.comparison.environment import Difference, differences, incomparable
from attn_exp.comparison.join import latest, method_key
from attn_exp.comparison.ratio import Spreads
from attn_exp.core.errors import UserError
from attn_exp.core.sheet.sheet import Column, Pairs, Sheet, Tone, written
from attn_exp.core.source import short
from attn_exp.core.stats.multiple import LEVEL, benjamini_hochberg
from attn_exp.core.stats.student import student_t_p
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.read import Sweep

FEWEST = 8
# A single value may be an outlier.
_SHORTEST = 2
_LEVELS = "▁▂▃▄▅▆▇█"
# The curve's full height, unless the series itself has a larger range.
_FULL_HEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Shift:
    """A change of level between two values of a series.

    `at` is the index of the first value of the new level, `log` the logarithm of new over old. `p` is the probability
    of so clear a split in a series without a change.
    """

    at: int
    log: float
    p: float


def first_shift(logs: Sequence[float]) -> Shift | None:
    """Return the clearest split of a series of logarithms, significant or not; None if it is too short."""
    splits = range(_SHORTEST, len(logs) - _SHORTEST + 1)
    if not splits:
        return None
    tested = [(_t(logs, at), at) for at in splits]
    t, at = max(tested, key=lambda split: abs(split[0]))
    p = min(1.0, len(tested) * student_t_p(t, len(logs) - 2))
    return Shift(at, statistics.fmean(logs[at:]) - statistics.fmean(logs[:at]), p)


def shifts(logs: Sequence[float], smallest: float) -> list[Shift]:
    """Return the changes of level of at least `smallest` (a log) in a series of at least 8 logarithms, in order.

    A shorter series has none.
    """
    return _search(logs, 0, smallest) if len(logs) >= FEWEST else []


def _search(logs: Sequence[float], start: int, smallest: float) -> list[Shift]:
    shift = first_shift(logs)
    if shift is None or shift.p > LEVEL or abs(shift.log) < smallest:
        return []
    before = _search(logs[: shift.at], start, smallest)
    after = _search(logs[shift.at :], start + shift.at, smallest)
    return [*before, Shift(start + shift.at, shift.log, shift.p), *after]


def _t(logs: Sequence[float], at: int) -> float:
    """Return Student's t of the two parts' means, with pooled variance."""
    before, after = logs[:at], logs[at:]
    mean_before, mean_after = statistics.fmean(before), statistics.fmean(after)
    squares = math.fsum((x - mean_before) ** 2 for x in before) + math.fsum((x - mean_after) ** 2 for x in after)
    error = math.sqrt(squares / (len(logs) - 2) * (1 / len(before) + 1 / len(after)))
    difference = mean_after - mean_before
    if error == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error


LEAST = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """A change of level by `change` (0.04: the metric rose by 4 %) from the sweep with index `at` on.

    `coincides` are the differences between that sweep's environment and the previous one's.
    """

    at: int
    change: float
    p: float
    coincides: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Trend:
    """One cell over all sweeps in chronological order.

    `cells` has None where a sweep lacks the cell. `relative` is its value over the first.
    `change` is the last of these minus 1, `per_sweep` the slope of a line fitted to their logarithms. `scatter` is
    their standard deviation around the levels between turns, that is, how much sessions differ.
    """

    cells: tuple[Cell | None, ...]
    relative: tuple[float | None, ...]
    change: float | None
    per_sweep: float | None
    scatter: float | None
    turns: tuple[Turn, ...]

    @property
    def cell(self) -> Cell:
        """The latest cell that exists."""
        return next(cell for cell in reversed(self.cells) if cell is not None)

    @property
    def valued(self) -> list[Cell]:
        """The cells that have a value."""
        return [cell for cell in self.cells if cell is not None and cell.value is not None]

    @property
    def n(self) -> int:
        """The number of sweeps in which it has a value."""
        return sum(value is not None for value in self.relative)

    @property
    def lost(self) -> bool:
        """Whether it had a value before and has none in the last sweep."""
        return self.relative[-1] is None and self.n > 0


@dataclass(frozen=True, kw_only=True, repr=False)
class History(Comparison):
    """The trends of all cells over `sweeps`, the oldest first; trends with turns come before the others."""

    rows: tuple[Trend, ...]

    def sheet(self) -> Sheet:
        """Return a row for each cell: its trend, its changes of level, and its value in each sweep."""
        names, metric = [sweep.name for sweep in self.sweeps], self.metric
        pairs: Pairs = (
            *case_pairs(self.rows),
            *NAMES,
            (Column("n", "n"), lambda row: row.n),
            (Column(f"first_{metric.name}", f"first {metric.kind.head}", "figure"), lambda row: row.valued[0].value),
            (Column(f"last_{metric.name}", f"last {metric.kind.head}", "figure"), lambda row: row.valued[-1].value),
            (Column("change", "change %", "percent"), lambda row: row.change),
            (Column("per_sweep", "per sweep %", "percent", spare=2), lambda row: row.per_sweep),
            (Column("scatter", "scatter %", "half", spare=1), lambda row: row.scatter),
            (Column("curve", "trend", joined=_curve([f"at_{name}" for name in names])), None),
            *((Column(f"at_{name}", ""), partial(_relative, at)) for at, name in enumerate(names)),
            (Column("level_changed", "level changed"), partial(_turns, names)),
            (Column("coincides", ""), lambda row: "; ".join(str(one) for turn in row.turns for one in turn.coincides)),
            (
                Column("last_status", "status" if any(row.lost for row in self.rows) else ""),
                lambda row: row.cells[-1].result.status if row.cells[-1] else "not measured",
            ),
        )
        return row_sheet(self.rows, pairs, [_tone(row, metric) for row in self.rows])


def _relative(at: int, row: Trend) -> float | None:
    return row.relative[at]


def _turns(names: Sequence[str], row: Trend) -> str:
    return ", ".join(f"{written(turn.change, 'percent')} % at {names[turn.at]}" for turn in row.turns)


def _tone(row: Trend, metric: ChosenMetric) -> Tone:
    if row.lost:
        return "bad"
    if not row.turns:
        return ""
    return "good" if (row.turns[-1].change > 0) == metric.kind.higher_is_better else "bad"


def _curve(columns: Sequence[str]) -> Callable[[dict[str, Any]], str]:
    """Return a function that draws a row's relative values as one character per sweep."""

    def draw(values: dict[str, Any]) -> str:
        present = [values[name] for name in columns if values[name] is not None]
        low, high = min(present), max(present)
        height = max(high - low, _FULL_HEIGHT)
        floor = (low + high - height) / 2
        steps = ((None if values[name] is None else (values[name] - floor) / height * len(_LEVELS)) for name in columns)
        return "".join(" " if step is None else _LEVELS[min(len(_LEVELS) - 1, int(step))] for step in steps)

    return draw


def compare_history(
    sweeps: Sequence[Sweep],
    cells: Sequence[Sequence[Cell]],
    metric: ChosenMetric,
    spreads: Spreads,
    *,
    anyway: bool = False,
) -> History:
    """Return the history of the selected cells of each sweep.

    Raises UserError if there are fewer than three sweeps, or their environments are incomparable and `anyway` is not
    set.
    """
    if len(sweeps) < LEAST:
        raise UserError(
            f"history=true needs {LEAST} sweeps or more, not {len(sweeps)}: name them as A,B,C or 'nightly-*'"
        )
    order = sorted(range(len(sweeps)), key=lambda index: sweeps[index].when)
    ordered, by_sweep = [sweeps[index] for index in order], [latest(cells[index])[0] for index in order]
    series = [cells for cells in _series(by_sweep) if _logs(cells)]
    if not series:
        raise UserError(f"no cell has a {metric} above zero in any of these sweeps: choose another metric=, or where=")
    steps = [_step(series, at) for at in range(1, len(ordered))]
    unequal = tuple(dict.fromkeys(difference for step in steps for difference in step))
    incomparable(unequal, "these sweeps", anyway=anyway)
    trends = _trends(series, metric, spreads, steps)
    few = sum(trend.n < FEWEST for trend in trends)
    sentences = [f"{few} cells have fewer than {FEWEST} values, too few to detect a change of level"] if few else []
    sentences += [
        f"between {ordered[at].name} and {ordered[at + 1].name}: {'; '.join(map(str, step))}"
        for at, step in enumerate(steps)
        if step
    ]
    return History(
        metric=metric,
        sweeps=tuple(ordered),
        differences=unequal,
        notes=tuple(sentences),
        rows=tuple(sorted(trends, key=lambda trend: (not trend.turns, not trend.lost, *case_order(trend.cell)))),
    )


def _series(by_sweep: Sequence[Sequence[Cell]]) -> list[tuple[Cell | None, ...]]:
    by_key: dict[Any, list[Cell | None]] = defaultdict(lambda: [None] * len(by_sweep))
    # Several sources of a backend in one sweep are series of their own.
    mixed = {label for cells in by_sweep for label in _several_sources(cells)}
    for index, cells in enumerate(by_sweep):
        for cell in cells:
            source = short(cell.result.source) if str(cell.result.backend["name"]) in mixed else ""
            by_key[cell.result.key, cell.direction, method_key(cell.result), source][index] = cell
    return [tuple(cells) for cells in by_key.values() if any(cell and cell.value is not None for cell in cells)]


def _several_sources(cells: Sequence[Cell]) -> set[str]:
    """Return the backends of which a sweep has several sources."""
    sources = {(str(cell.result.backend["name"]), short(cell.result.source)) for cell in cells}
    names = [name for name, _ in sources]
    return {name for name in names if names.count(name) > 1}


def _step(series: Sequence[Sequence[Cell | None]], at: int) -> tuple[Difference, ...]:
    """Return the differences between a sweep's environment and those in which its cells were measured before."""
    return differences(
        (before.result, now.result)
        for cells in series
        if (now := cells[at]) and now.value and (before := _before(cells, at))
    )


def _before(cells: Sequence[Cell | None], at: int) -> Cell | None:
    return next((cell for cell in reversed(cells[:at]) if cell and cell.value), None)


def _trends(
    series: Sequence[tuple[Cell | None, ...]],
    metric: ChosenMetric,
    spreads: Spreads,
    steps: Sequence[tuple[Difference, ...]],
) -> list[Trend]:
    logs = [_logs(cells) for cells in series]
    clearest = [first_shift(list(series_logs.values())) if len(series_logs) >= FEWEST else None for series_logs in logs]
    adjusted = iter(benjamini_hochberg([shift.p for shift in clearest if shift is not None]))
    trends = []
    for cells, by_index, first in zip(series, logs, clearest, strict=True):
        # Among thousands of cells some would turn by chance, so p-values are adjusted for their number.
        p = next(adjusted) if first is not None else 1.0
        turns: list[Turn] = []
        values, present = list(by_index.values()), list(by_index)
        if p <= LEVEL:
            smallest = math.log1p(spreads.margin(next(cell for cell in cells if cell is not None).result))
            for shift in shifts(values, smallest):
                before, at = present[shift.at - 1], present[shift.at]
                coincides = tuple(dict.fromkeys(difference for step in steps[before:at] for difference in step))
                turns.append(Turn(at, math.expm1(shift.log), max(p, shift.p), coincides))
        trends.append(_trend(cells, by_index, turns))
    return trends


def _trend(cells: tuple[Cell | None, ...], logs: dict[int, float], turns: Sequence[Turn]) -> Trend:
    values, present = list(logs.values()), list(logs)
    bounds = [0, *(present.index(turn.at) for turn in turns), len(values)]
    parts = [values[low:high] for low, high in itertools.pairwise(bounds)]
    residuals = [value - statistics.fmean(part) for part in parts for value in part]
    free = len(values) - len(parts)
    return Trend(
        cells=cells,
        relative=tuple(math.exp(logs[index]) if index in logs else None for index in range(len(cells))),
        change=math.expm1(values[-1]) if len(values) > 1 else None,
        per_sweep=math.expm1(statistics.linear_regression(present, values).slope) if len(values) > 1 else None,
        scatter=math.expm1(math.sqrt(math.fsum(r * r for r in residuals) / free)) if free > 0 else None,
        turns=tuple(turns),
    )


def _logs(cells: Sequence[Cell | None]) -> dict[int, float]:
    """Return the logarithm of each value over the first by sweep index."""
    values = {index: cell.value for index, cell in enumerate(cells) if cell and cell.value}
    first = next(iter(values.values()), 0.0)
    return {index: math.log(value / first) for index, value in values.items() if value > 0}
