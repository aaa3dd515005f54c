"""Rank the backends of one case and pass: which are among the best, and which rows decide nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from attn_exp.compare.ratio import Ratio, Spreads, gain, ratio
from attn_exp.core.flags import INTERFERENCE
from attn_exp.core.multiple_tests import worse_than_best
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.same_kernel import same_kernel

# A half-width that is no `unstable` row's and still large: the record is an old one, or was measured in few rounds.
LARGE = 0.05


@dataclass(frozen=True, slots=True)
class Ranking:
    """One cell among the backends of its case and pass.

    `gain` is how many times better it is than the baseline, or without a baseline than the best. It is None if the cell
    or the baseline has no value. `best` marks the best and all that are too close to it to call. `doubt` says why the
    row decides nothing: it is not the best, nor worse than it. `same` are the labels of the backends that ran the same
    kernel: they are one rival, and differ by noise.
    """

    cell: Cell
    group: int
    gain: Ratio | None
    best: bool
    doubt: str = ""
    same: tuple[str, ...] = ()


def doubt_about(cell: Cell, metric: ChosenMetric) -> str:
    """Return why a cell decides nothing: `busy_host`, `shared_gpu`, `unstable`, or a large interval; else empty.

    Only values that a clock measured are in doubt: a busy machine changes no error and no memory.
    """
    kind = metric.kind
    if cell.value is None or not (kind.follows_clock or kind.has_time_interval or kind.of_power):
        return ""
    flags = [flag for flag in (*sorted(INTERFERENCE), "unstable") if flag in cell.flags]
    wide = cell.half_width is not None and cell.half_width >= LARGE
    return flags[0] if flags else "a wide interval" if wide else ""


def doubt_notes(doubts: Sequence[str]) -> list[str]:
    """Return the note that says how many rows decide nothing, and why; `doubts` has an item for each row."""
    counts = Counter(doubt for doubt in doubts if doubt)
    if not counts:
        return []
    each = ", ".join(f"{count} {doubt}" for doubt, count in counts.most_common())
    total = counts.total()
    return [
        f"{total} of {len(doubts)} rows decide nothing ({each}): they are neither the best nor worse than another, "
        "and in no mean"
    ]


def ranked(
    group: Sequence[Cell], index: int, metric: ChosenMetric, spreads: Spreads, baseline: str | None
) -> list[Ranking]:
    """Rank the cells of one group, which may be compared with each other.

    Cells in doubt are beside the ranking: without them there is a best one, and it is what others are worse than.
    Backends that ran the same kernel count as one, whose fastest row stands for it.
    """
    doubts = [doubt_about(cell, metric) for cell in group]
    valued = [cell for cell in group if cell.value is not None]
    sure = [cell for cell, doubt in zip(group, doubts, strict=True) if cell.value is not None and not doubt]
    best = min(sure, key=lambda cell: rank(cell, metric), default=None)
    if baseline:
        base = next((cell for cell in valued if is_label(cell.result.label, baseline)), None)
    else:
        base = best or min(valued, key=lambda cell: rank(cell, metric), default=None)
    among = _among_the_best(best, sure, metric, spreads) if best is not None else set()
    return [
        Ranking(
            cell,
            index,
            _gain(cell, base, metric, spreads),
            id(cell) in among,
            doubt,
            tuple(
                other.result.label
                for other in group
                if other is not cell and same_kernel(cell.result, other.result, cell.direction)
            ),
        )
        for cell, doubt in zip(group, doubts, strict=True)
    ]


def _among_the_best(best: Cell, sure: Sequence[Cell], metric: ChosenMetric, spreads: Spreads) -> set[int]:
    """Return the identities of the best cell and of those that are too close to it to call."""
    rivals: list[list[Cell]] = []
    for cell in sorted(sure, key=lambda cell: rank(cell, metric)):
        one = next((one for one in rivals if same_kernel(one[0].result, cell.result, cell.direction)), None)
        if one is None:
            rivals.append([cell])
        else:
            one.append(cell)
    leading, *others = rivals
    known = [(one, over.p) for one in others if (over := _gain(one[0], best, metric, spreads)) is not None]
    worse = worse_than_best([p for _, p in known])
    close = [one for (one, _), is_worse in zip(known, worse, strict=True) if not is_worse]
    return {id(cell) for one in (leading, *close) for cell in one}


def _gain(cell: Cell, over: Cell | None, metric: ChosenMetric, spreads: Spreads) -> Ratio | None:
    if over is None or cell.value is None:
        return None
    if cell is over:
        return Ratio(1.0, 1.0, 1.0, 0.0, 1.0)
    return ratio(cell, over, metric, spreads.between_rows(cell.result, over.result))


def looks_better(row: Ranking, best: Ranking, metric: ChosenMetric) -> bool:
    """Return whether a row in doubt has a better value than the best of its group, by another kernel."""
    if not row.doubt or row.cell.value is None or row.cell.result.label in best.same:
        return False
    return (gain(row.cell, best.cell, metric) or 0.0) > 0


def open_pair(group: Sequence[Ranking], metric: ChosenMetric) -> tuple[Ranking, Ranking] | None:
    """Return the best of a group and what may be better, sorted by their labels, or None.

    That is the next row that is too close to the best to call, or else the best of those in doubt that look better.
    """
    best = sorted((row for row in group if row.best), key=lambda row: rank(row.cell, metric))
    if not best:
        return None
    leading, *others = best
    other = next((row for row in others if row.cell.result.label not in leading.same), None)
    in_doubt = [row for row in group if looks_better(row, leading, metric)]
    other = other or min(in_doubt, key=lambda row: rank(row.cell, metric), default=None)
    if other is None:
        return None
    # The same order for both passes, so that one duel serves both.
    one, two = sorted((leading, other), key=lambda row: (row.cell.result.label, row.cell.result.job))
    return one, two


def rank(cell: Cell, metric: ChosenMetric) -> float:
    """Return what the best of several cells has least of."""
    assert cell.value is not None
    return -cell.value if metric.kind.higher_is_better else cell.value


def is_label(label: str, baseline: str) -> bool:
    """Return whether a label is the baseline's; the provider in `auto (cudnn)` need not be typed."""
    return label == baseline or label.startswith(f"{baseline} (")
