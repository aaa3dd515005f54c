"""Rank the backends of one case and pass: which is the fastest, and which are too close to it to call.

Intervals decide, and flags inform: a row differs from the fastest if the interval of their ratio, corrected for the
number of rivals, excludes 1. Only a row without a value is left out.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attn_exp.compare.ratio import Ratio, Spreads, ratio
from attn_exp.compare.settled import Settled, Settlements
from attn_exp.core.stats.multiple import worse_than_best
from attn_exp.results.cell import Cell, ChosenMetric, same_kernel


@dataclass(frozen=True, slots=True)
class Ranking:
    """One cell among the backends of its case and pass.

    `gain` is how many times better it is than the baseline, or without a baseline than the best. It is None if the cell
    or the baseline has no value. `best` marks the best and all that are too close to it to call. `same` are the labels
    of the backends that ran the same kernel: they are one rival, and differ by noise. `duels` has what duels decided
    about the row and others that are or were among the best, by label.
    """

    cell: Cell
    group: int
    gain: Ratio | None
    best: bool
    same: tuple[str, ...] = ()
    duels: Mapping[str, Settled] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the backend in tables."""
        return self.cell.result.label

    @property
    def equal(self) -> frozenset[str]:
        """The labels of the backends that duels found equivalent."""
        return frozenset(label for label, one in self.duels.items() if one.equal)


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

    Backends that ran the same kernel count as one, whose fastest row stands for it. `settlements` may decide pairs that
    intervals leave too close to call.
    """
    valued = [cell for cell in group if cell.value is not None]
    first = base = min(valued, key=lambda cell: rank(cell, metric), default=None)
    if baseline:
        base = next((cell for cell in valued if is_label(cell.result.label, baseline)), None)
    close = _among_the_best(first, valued, metric, spreads) if first is not None else []
    among = {id(cell) for cell in settlements.left(close)}
    return [
        Ranking(
            cell,
            index,
            gain_over(cell, base, metric, spreads),
            id(cell) in among,
            tuple(
                other.result.label
                for other in group
                if other is not cell and same_kernel(cell.result, other.result, cell.direction)
            ),
            _of_duels(cell, close, settlements),
        )
        for cell in group
    ]


def _among_the_best(best: Cell, valued: Sequence[Cell], metric: ChosenMetric, spreads: Spreads) -> list[Cell]:
    """Return the best cell and those that are too close to it to call."""
    rivals: list[list[Cell]] = []
    for cell in sorted(valued, key=lambda cell: rank(cell, metric)):
        one = next((one for one in rivals if same_kernel(one[0].result, cell.result, cell.direction)), None)
        if one is None:
            rivals.append([cell])
        else:
            one.append(cell)
    leading, *others = rivals
    over_best = [(one, over) for one in others if (over := gain_over(one[0], best, metric, spreads)) is not None]
    # A pair that was not measured in turns may contradict the order of those that were.
    known = [(one, over.p if over.value < 1 else 1.0) for one, over in over_best]
    worse = worse_than_best([p for _, p in known])
    close = [one for (one, _), is_worse in zip(known, worse, strict=True) if not is_worse]
    return [cell for one in (leading, *close) for cell in one]


def _of_duels(cell: Cell, contenders: Sequence[Cell], settlements: Settlements) -> dict[str, Settled]:
    """Return what duels decided about a cell and others that may be the best, by label."""
    if not settlements or not any(cell is one for one in contenders):
        return {}
    found = ((other.result.label, settlements.over(cell, other)) for other in contenders if other is not cell)
    return {label: one for label, one in found if one is not None}


def gain_over(cell: Cell, over: Cell | None, metric: ChosenMetric, spreads: Spreads) -> Ratio | None:
    """Return how many times better a cell is than another one of its group; None without two values."""
    if over is None or cell.value is None:
        return None
    if cell is over:
        return Ratio(1.0, 1.0, 1.0, 0.0, 1.0)
    kind = metric.kind
    # Equal calls take the same memory and make the same errors.
    varies = kind.follows_clock or kind.has_time_interval or kind.of_power
    return ratio(cell, over, metric, spreads.between_rows(cell.result, over.result) if varies else 0.0)


def winners(group: Sequence[Ranking], metric: ChosenMetric) -> list[Ranking]:
    """Return the best row of a case and pass and those that are too close to it to call, the best one first.

    This is what every table, page and command means by the fastest; empty where fewer than two backends have a value.
    """
    if len({row.label for row in group if row.cell.value is not None}) < 2:
        return []
    return sorted((row for row in group if row.best), key=lambda row: rank(row.cell, metric))


def is_tie(best: Sequence[Ranking]) -> bool:
    """Return whether several rivals win; names of one kernel, and those that duels found equivalent, are one rival."""
    if not best:
        return False
    one = {best[0].label, *best[0].same, *best[0].equal}
    one.update(*(row.same for row in best if row.label in best[0].equal))
    return any(row.label not in one for row in best)


def open_pair(group: Sequence[Ranking], metric: ChosenMetric) -> tuple[Ranking, Ranking] | None:
    """Return the two fastest rows that are too close to call and no duel compared, sorted by their labels, or None."""
    best = winners(group, metric)
    if not is_tie(best):
        return None
    first, *others = best
    other = next((row for row in others if row.label not in (*first.same, *first.duels)), None)
    if other is None:
        return None
    # The same order for both passes, so that one duel serves both.
    one, two = sorted((first, other), key=lambda row: (row.label, row.cell.result.job))
    return one, two


def rank(cell: Cell, metric: ChosenMetric) -> float:
    """Return what the best of several cells has least of: the value, or what the turns say that it is."""
    assert cell.value is not None
    value = cell.value if cell.turns is None else cell.turns.value
    return -value if metric.kind.higher_is_better else value


def is_label(label: str, baseline: str) -> bool:
    """Return whether a label is the baseline's; the provider in `auto (cudnn)` need not be typed."""
    return label == baseline or label.startswith(f"{baseline} (")
