"""The fastest backend of each case, and its lead: the one answer that every table, page and command gives.

The rows are ranked in ranking.py; this module counts their winners and puts them into words.
"""

import html
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attn_exp.compare.ranking import Ranking, by_group, is_tie, rank, winners
from attn_exp.compare.ratio import Spreads, doubts, gain, geometric_mean, times_text, uncertainty
from attn_exp.core.case.case import PASSES
from attn_exp.core.stats.interval import Uncertainty, combined
from attn_exp.core.text import and_text
from attn_exp.results.cell import Cell, ChosenMetric, cells_of
from attn_exp.results.duel_command import Duel

_NAMED = 3
# The timer `event` agrees with a plain loop within this share.
_EVENT_SPREAD = 0.05


@dataclass(frozen=True, slots=True)
class Winners:
    """One case and pass with its winners: the fastest row, then those that are too close to it to call.

    Attributes:
        group: all rows of the case and pass.
        rows: the winners.
        tied: whether these are several rivals. Names of one kernel, and equivalents by a duel, are one.
    """

    group: tuple[Ranking, ...]
    rows: tuple[Ranking, ...]
    tied: bool

    @property
    def labels(self) -> tuple[str, ...]:
        """The winners' names, sorted."""
        return tuple(sorted({row.label for row in self.rows}))

    @property
    def direction(self) -> str:
        """The pass."""
        return self.rows[0].cell.direction


@dataclass(frozen=True, slots=True)
class Lead:
    """How many times better the headline's winner is than the best of the others, as a geometric mean.

    Attributes:
        over: the other backend.
        value: the mean over all rows that both have.
        low: the lower end of its 95 % interval.
        high: the upper end.
        by_pass: the mean of each pass, if there are several.
    """

    over: str
    value: float
    low: float
    high: float
    by_pass: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        each = ", ".join(f"{name} {times_text(value)}x" for name, value in self.by_pass)
        interval = f"[{times_text(self.low)}, {times_text(self.high)}]"
        return f"{times_text(self.value)}x {self.over} {interval}" + (f" ({each})" if each else "")


@dataclass(frozen=True)
class Answer:
    """Which backend is fastest where, and by how much; `str` and `lines` put it into words.

    Attributes:
        metric: the metric that the backends are ranked by.
        won: the winners of each case and pass with two backends or more.
        lead: the lead of the headline's winner; None without another backend.
        eager: the number of rows in which another backend is faster by the timer `event`, by label.
        eager_rows: the number of rows that this timer measured.
        settle: the duel that decides the tie in which most is at stake.
        settle_all: the command that runs the duels of all ties; empty if it is unknown.
    """

    metric: ChosenMetric
    won: tuple[Winners, ...] = ()
    lead: Lead | None = None
    eager: Mapping[str, int] | None = None
    eager_rows: int = 0
    settle: Duel | None = None
    settle_all: str = ""

    def __str__(self) -> str:
        return "\n".join(self.lines() or ["there is nothing to compare: fewer than two backends have a result"])

    def _repr_html_(self) -> str:
        return f"<pre style='white-space: pre-wrap'>{html.escape(str(self))}</pre>"

    @property
    def ties(self) -> int:
        """In how many rows the winners are too close to call."""
        return sum(one.tied for one in self.won)

    def lines(self) -> list[str]:
        """Return the headline, the order in eager PyTorch if it differs, and how to decide what is too close."""
        return [*self.headline(), *filter(None, self.next_step())]

    def headline(self) -> list[str]:
        """Return who is fastest, and where calls without a CUDA graph have another order, who is then."""
        if not self.won:
            return []
        first, *others = _by_winners(self.won)
        by_time = self.metric.kind.follows_clock
        said = f"{first} {'are too close to call' if first.tied else 'is fastest' if by_time else 'is best'}"
        said += "" if by_time else f" by {self.metric}"
        said += f" in {len(first.rows)} of {self._all_rows()}" if others else self._everywhere()
        if self.lead is not None:
            said += f": {f'{first.leader} is ' if first.tied else ''}{self.lead}"
        parts = [f"{one} {'tie ' if one.tied else ''}in {len(one.rows)}" for one in others[:_NAMED]]
        parts += [f"others in {sum(len(one.rows) for one in others[_NAMED:])}"] if others[_NAMED:] else []
        return ["; ".join([said, *parts]), *self._eager_line()]

    def next_step(self) -> tuple[str, str]:
        """Return what is too close to call, and the command that decides it; both are empty if nothing is."""
        if self.settle is None:
            return "", ""
        pair = f"{self.settle.a.result.label} and {self.settle.b.result.label}"
        if self.ties == 1:
            return f"{pair} are too close to call; to decide:", self.settle.command
        said = f"too close to call in {self.ties} of {len(self.won)}; to decide"
        return (f"{said} all:", self.settle_all) if self.settle_all else (f"{said} {pair}:", self.settle.command)

    def _everywhere(self) -> str:
        passes, shapes = self._passes(), self._shapes()
        said = "" if shapes == 1 else " in both shapes" if shapes == 2 else f" in all {shapes} shapes"
        if len(passes) > 1:
            return f"{said}, {and_text(passes)}"
        return f"{said} in the {passes[0]} pass" if passes[0] != "forward" and not said else said

    def _all_rows(self) -> str:
        passes, shapes = self._passes(), f"{self._shapes()} {'shape' if self._shapes() == 1 else 'shapes'}"
        if len(self.won) == self._shapes():
            return shapes
        return f"{len(self.won)} ({shapes}, {and_text(passes)})"

    def _shapes(self) -> int:
        return len({one.rows[0].cell.result.case for one in self.won})

    def _passes(self) -> list[str]:
        there = {one.direction for one in self.won}
        return [name for name in PASSES if name in there]

    def _eager_line(self) -> list[str]:
        if not self.eager:
            return []
        each = [f"{label} is faster in {count}" for label, count in sorted(self.eager.items(), key=lambda one: -one[1])]
        rows = str(self.eager_rows) if self.eager_rows == len(self.won) else f"the {self.eager_rows} with such times"
        return [f"In eager PyTorch, where Python launches each call, {and_text(each)} of {rows}."]


def answer_of(
    rows: Sequence[Ranking],
    metric: ChosenMetric,
    spreads: Spreads,
    ties: Sequence[Duel] = (),
    settle_all: str = "",
) -> Answer:
    """Return who is fastest in each case and pass of ranked rows.

    `ties` are the duels that decide what is too close to call, first where most is at stake, and `settle_all` is the
    command that runs all of them; empty if it is unknown.
    """
    groups = [(tuple(group), winners(group, metric)) for group in by_group(rows)]
    won = tuple(Winners(group, tuple(best), is_tie(best)) for group, best in groups if best)
    if not won:
        return Answer(metric)
    eager, eager_rows = _eager(won, metric, spreads)
    settle = ties[0] if ties else None
    return Answer(metric, won, _lead(won, metric, spreads), eager, eager_rows, settle, settle_all)


@dataclass(frozen=True, slots=True)
class _Same:
    """Rows with the same winner, or the same tie: `labels` are its names."""

    labels: tuple[str, ...]
    rows: tuple[Winners, ...]

    @property
    def tied(self) -> bool:
        return self.rows[0].tied

    @property
    def leader(self) -> str:
        """The winner, of a tie the one that is most often the fastest."""
        first = Counter(one.rows[0].label for one in self.rows)
        return self.labels[0] if not self.tied else max(self.labels, key=lambda label: first[label])

    @property
    def every(self) -> set[str]:
        """All names that win any of the rows."""
        return {label for one in self.rows for label in one.labels}

    def __str__(self) -> str:
        if self.tied:
            return and_text(self.labels)
        own = self.labels[0]
        others = sorted(set.intersection(*(set(one.labels) for one in self.rows)) - {own})
        if not others:
            return own
        winner = next(row for row in self.rows[0].rows if row.label == own)
        kind = "same kernel" if set(others) <= set(winner.same) else "equivalent"
        return f"{own} ({kind}: {', '.join(others)})"


def _by_winners(won: Iterable[Winners]) -> list[_Same]:
    """Return the rows with the same winners together, the most frequent first, sole winners before ties.

    If one kernel has several names, the one that wins most rows stands for all.
    """
    rows = list(won)
    wins = Counter(label for one in rows for label in one.labels)
    firsts = Counter(one.rows[0].label for one in rows)
    found: dict[tuple[str, ...], list[Winners]] = defaultdict(list)
    for one in rows:
        labels = one.labels if one.tied else (min(one.labels, key=lambda label: (-wins[label], -firsts[label])),)
        found[labels].append(one)
    same = [_Same(labels, tuple(rows)) for labels, rows in found.items()]
    return sorted(same, key=lambda one: (-len(one.rows), one.tied))


def _lead(won: Sequence[Winners], metric: ChosenMetric, spreads: Spreads) -> Lead | None:
    """Return the headline's lead over the best of the other backends; None without one, or where it wins no majority.

    Rows' own uncertainty averages out over cases; what equal rows differ by does not.
    """
    first, *others = _by_winners(won)
    if others and 2 * len(first.rows) <= len(won):
        return None
    counts = Counter(row.label for one in won for row in one.group if row.cell.value is not None)
    leads = [
        lead
        for other in counts
        # A backend that lacks most of the rows is no measure of the lead in all.
        if other not in first.every and 2 * counts[other] >= len(won)
        if (lead := _lead_over(first.leader, other, won, metric, spreads)) is not None
    ]
    return min(leads, key=lambda lead: lead.value, default=None)


def _lead_over(label: str, over: str, won: Sequence[Winners], metric: ChosenMetric, spreads: Spreads) -> Lead | None:
    logs, own, spread = defaultdict[str, list[float]](list), list[Uncertainty](), 0.0
    for one in won:
        of_label = {row.label: row for row in one.group}
        row, other = of_label.get(label), of_label.get(over)
        if row is None or other is None:
            continue
        if (duel := row.duels.get(over)) is not None:
            logs[one.direction].append(math.log(duel.value))
            own.append(Uncertainty((math.log(duel.high) - math.log(duel.low)) / 2))
            continue
        log = gain(row.cell, other.cell, metric)
        if log is None:
            continue
        logs[one.direction].append(log)
        parts, least = doubts(row.cell, other.cell, spreads.between_rows(row.cell.result, other.cell.result))
        own += parts
        spread = max(spread, least)
    every = list(itertools.chain(*logs.values()))
    if not every:
        return None
    whole = combined(own)
    half = combined([Uncertainty(whole.half / len(every), whole.degrees), Uncertainty(math.log1p(spread))]).half
    mean = geometric_mean(every)
    by_pass = tuple((name, geometric_mean(logs[name])) for name in PASSES if name in logs) if len(logs) > 1 else ()
    return Lead(over, mean, mean * math.exp(-half), mean * math.exp(half), by_pass)


def _eager(won: Sequence[Winners], metric: ChosenMetric, spreads: Spreads) -> tuple[dict[str, int], int]:
    """Return in how many rows another backend is surely faster by the timer `event`, and how many rows have its times.

    That timer sees what a plain loop in Python does, the host's gaps included; the ranking one sees the device alone.
    """
    if metric.name != "time_us":
        return {}, 0
    counts, rows = Counter[str](), 0
    for one in won:
        by_event = ChosenMetric("event_time_us", one.direction)
        found = cells_of([row.cell.result for row in one.group], by_event)
        cells = {cell.result.label: cell for cell in found if cell.value is not None}
        if len(cells) < 2:
            continue
        rows += 1
        first = min(cells.values(), key=lambda cell: rank(cell, by_event))
        best = [cells[label] for label in one.labels if label in cells]
        if first.result.label not in one.labels and best:
            counts[first.result.label] += all(_faster(first, other, by_event, spreads) for other in best)
    return {label: count for label, count in counts.items() if count}, rows


def _faster(cell: Cell, over: Cell, metric: ChosenMetric, spreads: Spreads) -> bool:
    log = gain(cell, over, metric)
    spread = max(_EVENT_SPREAD, spreads.between_rows(cell.result, over.result))
    return log is not None and log > uncertainty(cell, over, spread).half
