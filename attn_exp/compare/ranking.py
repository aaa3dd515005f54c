"""Rank the backends of one case and pass: which are among the best, and which rows decide nothing."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from attn_exp.compare.ratio import Ratio, Spreads, ratio
from attn_exp.compare.rule import times_text
from attn_exp.compare.settled import Settled, Settlements
from attn_exp.core.flags import doubts
from attn_exp.core.multiple_tests import worse_than_best
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.same_kernel import same_kernel

# A half-width that is no `unstable` row's and still large: the record is an old one, or was measured in few rounds.
LARGE = 0.05


@dataclass(frozen=True, slots=True)
class Ranking:
    """One cell among the backends of its case and pass.

    `gain` is how many times better it is than the baseline, or without a baseline than the best. It is None if the cell
    or the baseline has no value. `best` marks the best and all that are too close to it to call; no row where one in
    doubt may be better. `doubt` says why the row decides nothing: it is not the best, nor worse than it. Such a row
    has a `challenge` if it may be better than the best of the others, or than the fastest where all are in doubt: how
    many times better, with an interval that does not lie wholly below 1. `same` are the labels of the backends that ran
    the same kernel: they are one rival, and differ by noise.

    `contends` marks the rows that may be the best: those that no duel found slower. `duels` has what duels decided
    about the row and others of its case, by label; a row in doubt of which a duel decided may be `best`.
    """

    cell: Cell
    group: int
    gain: Ratio | None
    best: bool
    doubt: str = ""
    same: tuple[str, ...] = ()
    challenge: Ratio | None = None
    contends: bool = False
    duels: Mapping[str, Settled] = field(default_factory=dict)

    @property
    def equal(self) -> frozenset[str]:
        """The labels of the backends that duels found equivalent."""
        return frozenset(label for label, one in self.duels.items() if one.equal)


@dataclass(frozen=True, slots=True)
class SettledPair:
    """Two rows of which a duel decided; the first is the faster one, or the two are equivalent."""

    row: Ranking
    other: Ranking
    found: Settled

    @property
    def said(self) -> str:
        """What the duel decided, as `flash is 1.01 [1.01, 1.02] times as fast as cudnn`."""
        value, low, high = map(times_text, (self.found.value, self.found.low, self.found.high))
        label, other = self.row.cell.result.label, self.other.cell.result.label
        if self.found.equal:
            return f"{label} and {other} are equivalent, {value} [{low}, {high}]"
        return f"{label} is {value} [{low}, {high}] times as fast as {other}"


def settled_pairs(rows: Iterable[Ranking]) -> tuple[SettledPair, ...]:
    """Return what duels decided about rows that may be the best of their case and pass, each pair once."""
    return tuple(
        SettledPair(row, other, found)
        for group in by_group(rows)
        for index, row in enumerate(group)
        for at, other in enumerate(group)
        if (found := row.duels.get(other.cell.result.label)) is not None
        and (index < at if found.equal else found.value > 1)
    )


# What the rows of one case and pass decide: `sure` if one is better than all others beyond doubt, `close` if several
# are too close to call, `open` if a row in doubt may be better, `single` if fewer than two backends have a result.
Outcome = Literal["sure", "close", "open", "single"]


# Doubts about a time that is right, but not known well: longer sampling would remove them.
WIDE = ("unstable", "a wide interval")


def doubt_about(cell: Cell, metric: ChosenMetric) -> str:
    """Return why a cell decides nothing: `busy_host`, `shared_gpu`, `unstable`, or a large interval; else empty.

    Only values that a clock measured are in doubt: a busy machine changes no error and no memory.
    """
    kind = metric.kind
    if cell.value is None or not (kind.follows_clock or kind.has_time_interval or kind.of_power):
        return ""
    flags = doubts(cell.flags)
    wide = cell.half_width is not None and cell.half_width >= LARGE
    return flags[0] if flags else "a wide interval" if wide else ""


def doubt_notes(doubts: Sequence[str]) -> list[str]:
    """Return the note that says how many rows decide nothing, and why; `doubts` has an item for each row."""
    said = deciding_nothing(doubts)
    return [f"{said}: they are neither the best nor worse than another, and in no mean"] if said else []


def deciding_nothing(doubts: Sequence[str]) -> str:
    """Return how many rows decide nothing, and why; empty if there are none."""
    counts = Counter(doubt for doubt in doubts if doubt)
    each = ", ".join(f"{count} {doubt}" for doubt, count in counts.most_common())
    return f"{counts.total()} of {len(doubts)} rows decide nothing ({each})" if counts else ""


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

    Cells in doubt are beside the ranking: without them there is a best one, and it is what others are worse than.
    Backends that ran the same kernel count as one, whose fastest row stands for it. What that leaves open,
    `settlements` may decide.
    """
    doubts = [doubt_about(cell, metric) for cell in group]
    valued = [cell for cell in group if cell.value is not None]
    sure = [cell for cell, doubt in zip(group, doubts, strict=True) if cell.value is not None and not doubt]
    best = min(sure, key=lambda cell: rank(cell, metric), default=None)
    first = base = best or min(valued, key=lambda cell: rank(cell, metric), default=None)
    if baseline:
        base = next((cell for cell in valued if is_label(cell.result.label, baseline)), None)
    challenges = [
        _challenge(cell, first, metric, spreads) if doubt else None for cell, doubt in zip(group, doubts, strict=True)
    ]
    # What is the best is open where a row in doubt may be better.
    is_open = best is None or any(challenges)
    among = _among_the_best(best, sure, metric, spreads) if best is not None and not is_open else set()
    contenders = [
        cell
        for cell, challenge in zip(group, challenges, strict=True)
        if (cell is first or challenge is not None if is_open else id(cell) in among)
    ]
    left = settlements.left(contenders)
    contend = {id(cell) for cell in left}
    if not is_open or (len(contenders) > 1 and settlements.are_one(left)):
        among, challenges = contend, [None] * len(group)
    challenges = [one if id(cell) in contend else None for cell, one in zip(group, challenges, strict=True)]
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
            challenge,
            id(cell) in contend,
            _of_duels(cell, contenders, settlements),
        )
        for cell, doubt, challenge in zip(group, doubts, challenges, strict=True)
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


def _of_duels(cell: Cell, contenders: Sequence[Cell], settlements: Settlements) -> dict[str, Settled]:
    """Return what duels decided about a cell and others that may be the best, by label."""
    if not settlements or not any(cell is one for one in contenders):
        return {}
    found = ((other.result.label, settlements.over(cell, other)) for other in contenders if other is not cell)
    return {label: one for label, one in found if one is not None}


def _gain(cell: Cell, over: Cell | None, metric: ChosenMetric, spreads: Spreads) -> Ratio | None:
    if over is None or cell.value is None:
        return None
    if cell is over:
        return Ratio(1.0, 1.0, 1.0, 0.0, 1.0)
    return ratio(cell, over, metric, spreads.between_rows(cell.result, over.result))


def _challenge(cell: Cell, first: Cell | None, metric: ChosenMetric, spreads: Spreads) -> Ratio | None:
    """Return how many times better a cell in doubt is than the first, or None if it is surely worse, or the same."""
    if first is None or cell is first or same_kernel(cell.result, first.result, cell.direction):
        return None
    over = _gain(cell, first, metric, spreads)
    return over if over is not None and over.high > 1 else None


def leader(group: Sequence[Ranking], metric: ChosenMetric) -> Ranking | None:
    """Return the best row that is not in doubt, or the best of all where each is; None without a value.

    What duels decided comes before values.
    """
    valued = [row for row in group if row.cell.value is not None]
    among = [row for row in valued if row.best] or [row for row in valued if row.contends] or valued
    sure = [row for row in among if not row.doubt]
    return min(sure or among, key=lambda row: rank(row.cell, metric), default=None)


def challengers(group: Sequence[Ranking]) -> list[Ranking]:
    """Return the rows in doubt that may be better than the leader, the best of them first."""
    rows = [row for row in group if row.challenge is not None]
    return sorted(rows, key=lambda row: -row.challenge.value if row.challenge else 0.0)


def outcome(group: Sequence[Ranking]) -> Outcome:
    """Return what the rows of one case and pass decide. Every count of decided and undecided passes is one of these."""
    valued = [row for row in group if row.cell.value is not None]
    if len({row.cell.result.label for row in valued}) < 2:
        return "single"
    best = [row for row in group if row.best]
    if not best:
        return "open"
    # Names of one kernel, and those that duels found equivalent, are one rival.
    one = {best[0].cell.result.label, *best[0].same, *best[0].equal}
    one.update(*(row.same for row in best if row.cell.result.label in best[0].equal))
    return "sure" if all(row.cell.result.label in one for row in best) else "close"


def open_pair(group: Sequence[Ranking], metric: ChosenMetric) -> tuple[Ranking, Ranking] | None:
    """Return the two rows of a group whose order decides what is best, sorted by their labels, or None.

    These are the best two of the leader and of those in doubt that may be better; else the two that are too close to
    call.
    """
    leading = leader(group, metric)
    if leading is None or outcome(group) not in ("close", "open"):
        return None
    valued = [row for row in group if row.cell.value is not None]
    rivals = challengers(group) or [row for row in valued if row.best or (leading.doubt and not leading.duels)]
    several = [leading, *(row for row in rivals if row is not leading)]
    first, *others = sorted(several, key=lambda row: rank(row.cell, metric))
    other = next((row for row in others if row.cell.result.label not in (*first.same, *first.duels)), None)
    if other is None:
        return None
    # The same order for both passes, so that one duel serves both.
    one, two = sorted((first, other), key=lambda row: (row.cell.result.label, row.cell.result.job))
    return one, two


def picks(group: Sequence[Ranking]) -> frozenset[str]:
    """Return the labels that are among the best of a group, and those of rows in doubt that ran their kernels."""
    best = [row for row in group if row.best]
    return frozenset(row.cell.result.label for row in best).union(*(row.same for row in best))


def rank(cell: Cell, metric: ChosenMetric) -> float:
    """Return what the best of several cells has least of."""
    assert cell.value is not None
    return -cell.value if metric.kind.higher_is_better else cell.value


def is_label(label: str, baseline: str) -> bool:
    """Return whether a label is the baseline's; the provider in `auto (cudnn)` need not be typed."""
    return label == baseline or label.startswith(f"{baseline} (")
