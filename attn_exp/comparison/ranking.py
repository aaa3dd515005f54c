"""Rank the backends of one case and pass: which is the fastest, and which are too close to it to call.

Intervals decide, and flags inform: a row differs from the fastest if the interval of their ratio, corrected for the
number of rivals, excludes 1. A row without a value, or with a half-width above 25 %, is left out.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attn_exp.comparison.ratio import Ratio, Spreads, ratio
from attn_exp.comparison.settled import Settled, Settlements
from attn_exp.core.stats.multiple import worse_than_best
from attn_exp.core.stats.paired import MARGIN_FLOOR
from attn_exp.results.cell import Cell, ChosenMetric, same_kernel


@dataclass(frozen=True, slots=True)
class Ranking:
    """One cell among the backends of its case and pass.

    `gain` is how many times better it is than the baseline, or without a baseline than the best. It is None if the cell
    or the baseline has no value that was measured well enough. `best` marks the best and all that are too close to it
    to call. `kernel` are the labels of the backends that ran the same kernels as often, and `same` those of them whose
    intervals agree with it: they are one rival, which ranks by its mean, `place`. `duels` has what duels decided about
    the row and others that are or were among the best, by label. `may_win` marks a row that may be better than the
    best, but was not measured well enough to be compared.
    """

    cell: Cell
    group: int
    gain: Ratio | None
    best: bool
    place: float
    may_win: bool = False
    same: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    duels: Mapping[str, Settled] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the backend in tables."""
        return self.cell.result.label

    @property
    def equal(self) -> frozenset[str]:
        """The labels of the backends that duels found equivalent."""
        return frozenset(label for label, duel in self.duels.items() if duel.equal)


def by_group(rows: Iterable[Ranking]) -> list[list[Ranking]]:
    """Return the rows of each case and pass together."""
    groups: dict[int, list[Ranking]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    return list(groups.values())


def ranked(
    group: Sequence[Cell],
    index: int,
    metric: ChosenMetric,
    spreads: Spreads,
    baseline: str | None,
    settlements: Settlements,
) -> list[Ranking]:
    """Rank the cells of one group, which may be compared with each other.

    Names of one kernel whose intervals agree are one rival. `settlements` may decide pairs that intervals leave too
    close to call.
    """
    rivals = _rivals([cell for cell in group if cell.compared], metric, spreads)
    of_cell = {id(cell): rival for rival in rivals for cell in rival}
    base = rivals[0] if rivals else []
    if baseline:
        base = next((rival for rival in rivals if any(is_label(cell.result.label, baseline) for cell in rival)), [])
    close = _among_the_best(rivals, metric, spreads)
    best = {id(cell) for rival in settlements.left(close) for cell in rival}
    rows = []
    for cell in group:
        rival = of_cell.get(id(cell), [])
        rest = [row for row in group if row is not cell]
        rows.append(
            Ranking(
                cell,
                index,
                Ratio(1.0, 1.0, 1.0, 0.0, 1.0) if rival is base and rival else ratio(rival, base, metric, spreads),
                id(cell) in best,
                _place(rival, metric) if rival else math.inf,
                bool(rivals) and _may_win(cell, rivals[0], metric),
                tuple(row.result.label for row in rest if any(row is equal for equal in rival)),
                tuple(row.result.label for row in rest if same_kernel(cell.result, row.result, cell.direction)),
                _of_duels(cell, [contender for each in close for contender in each], settlements),
            )
        )
    return rows


def _rivals(cells: Sequence[Cell], metric: ChosenMetric, spreads: Spreads) -> list[list[Cell]]:
    """Return the rivals, the best first: a cell, or those of one kernel whose intervals agree."""

    def agree(cell: Cell, second: Cell) -> bool:
        if not same_kernel(cell.result, second.result, cell.direction):
            return False
        gap = ratio([cell], [second], metric, spreads)
        return gap is not None and (gap.low <= 1 <= gap.high or abs(gap.value - 1) <= MARGIN_FLOOR)

    rivals: list[list[Cell]] = []
    for cell in sorted(cells, key=lambda cell: rank(cell, metric)):
        rival = next((rival for rival in rivals if all(agree(cell, member) for member in rival)), None)
        if rival is None:
            rivals.append([cell])
        else:
            rival.append(cell)
    return sorted(rivals, key=lambda rival: _place(rival, metric))


def _may_win(cell: Cell, best: Sequence[Cell], metric: ChosenMetric) -> bool:
    if cell.value is None or cell.compared:
        return False
    better = math.exp(cell.half or 0.0)
    value = cell.value * (better if metric.kind.higher_is_better else 1 / better)
    return (-value if metric.kind.higher_is_better else value) < _place(best, metric)


def _place(rival: Sequence[Cell], metric: ChosenMetric) -> float:
    return statistics.fmean(rank(cell, metric) for cell in rival)


def _among_the_best(rivals: Sequence[list[Cell]], metric: ChosenMetric, spreads: Spreads) -> list[list[Cell]]:
    """Return the best rival and those that are too close to it to call."""
    if not rivals:
        return []
    best, *rest = rivals
    over_best = [(rival, over) for rival in rest if (over := ratio(rival, best, metric, spreads)) is not None]
    # A pair that was not measured in turns may contradict the order of those that were.
    worse = worse_than_best([over.p if over.value < 1 else 1.0 for _, over in over_best])
    return [best, *(rival for (rival, _), is_worse in zip(over_best, worse, strict=True) if not is_worse)]


def _of_duels(cell: Cell, contenders: Sequence[Cell], settlements: Settlements) -> dict[str, Settled]:
    """Return what duels decided about a cell and others that may be the best, by label."""
    if not settlements or not any(cell is contender for contender in contenders):
        return {}
    decided = ((rival.result.label, settlements.over(cell, rival)) for rival in contenders if rival is not cell)
    return {label: duel for label, duel in decided if duel is not None}


def winners(group: Sequence[Ranking]) -> list[Ranking]:
    """Return the best row of a case and pass and those that are too close to it to call, the best one first.

    This is what every table, page and command means by the fastest; empty where fewer than two backends have a value,
    and where one that was not measured well enough may be the fastest.
    """
    if len({row.label for row in group if row.cell.value is not None}) < 2 or any(row.may_win for row in group):
        return []
    return sorted((row for row in group if row.best), key=lambda row: (row.place, len(row.label), row.label))


def is_tie(best: Sequence[Ranking]) -> bool:
    """Return whether several rivals win; names of one kernel, and those that duels found equivalent, are one rival."""
    if not best:
        return False
    names = {best[0].label, *best[0].same, *best[0].equal}
    names.update(*(row.same for row in best if row.label in best[0].equal))
    return any(row.label not in names for row in best)


def open_pair(group: Sequence[Ranking]) -> tuple[Ranking, Ranking] | None:
    """Return the two fastest rows that are too close to call and no duel compared, sorted by their labels, or None."""
    best = winners(group)
    if not is_tie(best):
        return None
    first, *rest = best
    second = next((row for row in rest if row.label not in (*first.same, *first.duels)), None)
    if second is None:
        return None
    # The same order for both passes, so that one duel serves both.
    a, b = sorted((first, second), key=lambda row: (row.label, row.cell.result.job))
    return a, b


def rank(cell: Cell, metric: ChosenMetric) -> float:
    """Return what the best of several cells has least of: the value, or what the turns say that it is."""
    assert cell.value is not None
    value = cell.value if cell.turns is None else cell.turns.value
    return -value if metric.kind.higher_is_better else value


def is_label(label: str, baseline: str) -> bool:
    """Return whether a label is the baseline's; the provider in `auto (cudnn)` need not be typed."""
    return label == baseline or label.startswith(f"{baseline} (")
