"""The fastest backend of each case, and its lead: the one answer that every table, page and command gives.

The rows are ranked in ranking.py; this module counts their winners and puts them into words.
"""

import html
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attn_exp.comparison.ranking import Ranking, by_group, is_tie, rank, winners
from attn_exp.comparison.ratio import Ratio, Spreads, gain, geometric_mean, ratio, times_text, uncertainty
from attn_exp.core.host.cpu import numbers_of
from attn_exp.core.text import and_text
from attn_exp.results.cell import Cell, ChosenMetric, cells_of
from attn_exp.results.duel_command import Duel

# A headline is no longer than this, and names so many winners and ties.
_LONGEST, _NAMED = 120, 3
# The timer `event` agrees with a plain loop within this share.
_EVENT_SPREAD = 0.05
# Timers that see nothing but the device: names of one kernel should not differ by them.
_DEVICE_TIMERS = ("device", "kernel", "graph")


@dataclass(frozen=True, slots=True)
class Lead:
    """How many times better a winner is than the best of the others, as a geometric mean over rows.

    Attributes:
        over: the other backend.
        value: the mean over all rows that both have.
        low: the lower end of its 95 % interval.
        high: the upper end.
    """

    over: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{times_text(self.value)} times as fast as {self.over} {self.interval}"

    @property
    def interval(self) -> str:
        """The interval as `[1.06, 1.10]`."""
        return f"[{times_text(self.low)}, {times_text(self.high)}]"


@dataclass(frozen=True, slots=True)
class Winners:
    """One case and pass with its winners: the fastest row, then those that are too close to it to call.

    Attributes:
        group: all rows of the case and pass.
        rows: the winners.
        tied: whether these are several rivals. Names of one kernel, and equivalents by a duel, are one.
        lead: the lead of the first over the best that is no winner; None without one.
    """

    group: tuple[Ranking, ...]
    rows: tuple[Ranking, ...]
    tied: bool
    lead: Lead | None

    @property
    def labels(self) -> tuple[str, ...]:
        """The winners' names, sorted."""
        return tuple(sorted({row.label for row in self.rows}))

    @property
    def direction(self) -> str:
        """The pass."""
        return self.rows[0].cell.direction


@dataclass(frozen=True)
class Answer:
    """Which backend is fastest where, and by how much; `str` and `lines` put it into words.

    Attributes:
        metric: the metric that the backends are ranked by.
        won: the winners of each case and pass with two backends or more.
        lead: the lead of the headline's winner; None without another backend, and where it wins no majority.
        unmeasured: the number of cases and passes without two rows that were measured well enough.
        noise: why most rows were not measured well enough; empty if most were.
        doubt: what rows of one kernel differ by, as a sentence; empty if they agree.
        eager: the number of rows in which another backend is faster by the timer `event`, by label.
        eager_rows: the number of rows that this timer measured.
        settle: the duel that decides the tie in which most is at stake.
        settle_all: the command that runs the duels of all ties; empty if it is unknown.
    """

    metric: ChosenMetric
    won: tuple[Winners, ...] = ()
    lead: Lead | None = None
    unmeasured: int = 0
    noise: str = ""
    doubt: str = ""
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
        return sum(case.tied for case in self.won)

    def lines(self) -> list[str]:
        """Return the headline, the order in eager PyTorch if it differs, and how to decide what is too close."""
        return [*self.headline(), *filter(None, self.next_step())]

    def headline(self) -> list[str]:
        """Return who is fastest; then what that cannot be trusted below, and another order by the timer `event`.

        Nobody is best by a metric that is yes or no.
        """
        verdict = [self._fastest()] if self.won and not self.metric.kind.is_fact else []
        eager = ""
        if self.eager:
            each = sorted(self.eager.items(), key=lambda entry: -entry[1])
            faster = and_text([f"{label} is fastest in {count}" for label, count in each])
            eager = f"In eager PyTorch, where Python launches each call, {faster} of {self.eager_rows} rows."
        return [*filter(None, [self.noise, *verdict, self.doubt, eager])]

    def next_step(self) -> tuple[str, str]:
        """Return what is too close to call, and the command that decides it; both are empty if nothing is."""
        if self.settle is None:
            return "", ""
        pair = f"{self.settle.a.result.label} and {self.settle.b.result.label}"
        if self.ties == 1:
            return f"{pair} are too close to call; to decide:", self.settle.command
        words = f"too close to call in {self.ties} of {self._rows}; to decide"
        return (f"{words} all:", self.settle_all) if self.settle_all else (f"{words} {pair}:", self.settle.command)

    @property
    def _rows(self) -> int:
        return len(self.won) + self.unmeasured

    def _fastest(self) -> str:
        first, *rest = _by_winners(self.won)
        by_time, count = self.metric.kind.follows_clock, self.ties if first.tied else len(first.rows)
        alone = not rest and not first.tied and all(row.lead is None for row in first.rows)
        one_rival = alone and len(first.every) > 1
        verdict = "are too close to call" if first.tied else "is fastest" if by_time else "is best"
        line = f"{and_text(sorted(first.every))} do not differ" if one_rival else f"{first} {verdict}"
        line += "" if by_time else f" by {self.metric}"
        if self._rows > 1:
            all_rows = "both rows" if self._rows == 2 else f"all {self._rows} rows"
            line += f" in {all_rows if count == self._rows else f'{count} of {self._rows} rows'}"
        parts = [f"{same} in {len(same.rows)}" for same in rest if not same.tied][:_NAMED]
        parts += [f"too close to call in {self.ties}"] if self.ties and not first.tied else []
        parts += [f"not measured well enough in {self.unmeasured}"] if self.unmeasured else []
        if self.lead is not None:
            lead = str(self.lead) if by_time else str(self.lead).replace(" as fast as ", " as good as ")
            # A winner of most rows may be far behind in the others.
            lead = lead if self.lead.value >= 1 else f"over all rows only {lead}"
            lead = f"; {first.leader} is {lead}" if first.tied else f", {lead}"
            # Names and counts come before the interval.
            room = _LONGEST - len(line) - sum(len(part) + 2 for part in parts)
            lead = lead if len(lead) <= room else lead.replace(f" {self.lead.interval}", "")
            line += lead if len(line) + len(lead) <= _LONGEST else ""
        for part in parts:
            line += f"; {part}" if len(line) + len(part) + 2 <= _LONGEST else ""
        return line


def winners_of(rows: Iterable[Ranking], metric: ChosenMetric, spreads: Spreads) -> list[Winners]:
    """Return the winners of each case and pass of ranked rows that has two backends or more."""
    won = []
    for group in by_group(rows):
        if best := winners(group):
            losers = [row for row in group if row.cell.compared and not row.best]
            nearest = min(losers, key=lambda row: (row.place, len(row.label), row.label), default=None)
            over = None if nearest is None else _over(best[0], nearest, group, metric, spreads)
            lead = None if nearest is None or over is None else Lead(nearest.label, over.value, over.low, over.high)
            won.append(Winners(tuple(group), tuple(best), is_tie(best), lead))
    return won


def _over(
    row: Ranking, rival: Ranking, group: Sequence[Ranking], metric: ChosenMetric, spreads: Spreads
) -> Ratio | None:
    """Return how many times better a row's rival is than another one; what a duel decided counts."""
    if not (row.cell.compared and rival.cell.compared):
        return None
    if (duel := row.duels.get(rival.label)) is not None:
        return Ratio(duel.value, duel.low, duel.high, 0.0, 0.0)
    cells, rival_cells = ([each.cell for each in group if each.label in (of.label, *of.same)] for of in (row, rival))
    return ratio(cells, rival_cells, metric, spreads)


def answer_of(
    rows: Sequence[Ranking], metric: ChosenMetric, spreads: Spreads, ties: Sequence[Duel] = (), settle_all: str = ""
) -> Answer:
    """Return who is fastest in each case and pass of ranked rows.

    `ties` are the duels that decide what is too close to call, first where most is at stake, and `settle_all` is the
    command that runs all of them; empty if it is unknown.
    """
    won = tuple(winners_of(rows, metric, spreads))
    groups = [group for group in by_group(rows) if len({row.label for row in group if row.cell.value is not None}) > 1]
    eager, eager_rows = _eager(won, metric, spreads)
    return Answer(
        metric=metric,
        won=won,
        lead=_lead(won, metric, spreads) if won else None,
        unmeasured=len(groups) - len(won),
        noise=_noise(groups, len(groups) - len(won)),
        doubt=_doubt(groups, metric, spreads),
        eager=eager,
        eager_rows=eager_rows,
        settle=ties[0] if ties else None,
        settle_all=settle_all,
    )


def _noise(groups: Sequence[Sequence[Ranking]], unmeasured: int) -> str:
    """Return why rows have no winner, if more than half of them have none."""
    noisy = [row.cell.result for group in groups for row in group if row.cell.value and not row.cell.compared]
    if 2 * unmeasured <= len(groups) or not noisy:
        return ""
    busiest = max(noisy, key=lambda result: result.others)
    processors = len(numbers_of(str(busiest.environment.get("cpu_affinity"))))
    why = f"other programs used {busiest.others:.1f} of {processors} processors"
    why = why if busiest.others >= 0.1 else "intervals are wider than +-25 %"
    return f"not measured well enough in {unmeasured} of {len(groups)} rows: {why}"


def _doubt(groups: Iterable[Sequence[Ranking]], metric: ChosenMetric, spreads: Spreads) -> str:
    """Return the pair of one kernel that differs most, as a sentence; empty if all agree."""
    if not metric.follows_time:
        return ""
    pairs: list[tuple[float, str, str]] = []
    for group in groups:
        for row in group:
            on_device = row.cell.result.device == "cuda" and row.cell.result.measuring.timer in _DEVICE_TIMERS
            for second in group if on_device and row.cell.compared else ():
                if second.label not in row.kernel or second.label in row.same or second.label <= row.label:
                    continue
                over = ratio([row.cell], [second.cell], metric, spreads) if second.cell.compared else None
                if over is not None:
                    pairs.append((math.expm1(abs(math.log(over.value))), row.label, second.label))
    if not pairs:
        return ""
    apart, name, second_name = max(pairs)
    return (
        f"{name} and {second_name} ran one kernel and differ by {100 * apart:.2g} %: "
        "this sweep is not to be trusted below that"
    )


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
        first = Counter(case.rows[0].label for case in self.rows)
        return self.labels[0] if not self.tied else max(self.labels, key=lambda label: first[label])

    @property
    def every(self) -> set[str]:
        """All names that win any of the rows."""
        return {label for case in self.rows for label in case.labels}

    def __str__(self) -> str:
        return and_text(self.labels) if len(self.labels) <= _NAMED else f"{len(self.labels)} backends"


def _by_winners(won: Sequence[Winners]) -> list[_Same]:
    """Return the rows with the same winners together, sole winners before ties, the most frequent first.

    If one kernel has several names, the one that wins most rows stands for all, of several the shortest.
    """
    wins = Counter(label for case in won for label in case.labels)
    by_labels: dict[tuple[str, ...], list[Winners]] = defaultdict(list)
    for case in won:
        labels = case.labels if case.tied else (min(case.labels, key=lambda label: (-wins[label], len(label), label)),)
        by_labels[labels].append(case)
    same = [_Same(labels, tuple(rows)) for labels, rows in by_labels.items()]
    return sorted(same, key=lambda entry: (entry.tied, -len(entry.rows)))


def _lead(won: Sequence[Winners], metric: ChosenMetric, spreads: Spreads) -> Lead | None:
    """Return the headline's lead over the best of the other backends; None without one, or where it wins no majority.

    Rows' own uncertainty averages out over cases; what equal rows differ by does not.
    """
    first, *rest = _by_winners(won)
    if rest and 2 * len(first.rows) <= len(won):
        return None
    counts = Counter(row.label for case in won for row in case.group if row.cell.compared)
    leads = [
        lead
        for rival in counts
        # A backend that lacks most of the rows is no measure of the lead in all.
        if rival not in first.every and 2 * counts[rival] >= len(won)
        if (lead := _lead_over(first.leader, rival, won, metric, spreads)) is not None
    ]
    return min(leads, key=lambda lead: (lead.value, len(lead.over), lead.over), default=None)


def _lead_over(label: str, over: str, won: Sequence[Winners], metric: ChosenMetric, spreads: Spreads) -> Lead | None:
    logs, squares, spread = list[float](), list[float](), 0.0
    for case in won:
        of_label = {row.label: row for row in case.group}
        row, rival = of_label.get(label), of_label.get(over)
        gap = None if row is None or rival is None else _over(row, rival, case.group, metric, spreads)
        if gap is None:
            continue
        logs.append(math.log(gap.value))
        squares.append(max(0.0, math.log(gap.high / gap.value) ** 2 - math.log1p(gap.spread) ** 2))
        spread = max(spread, gap.spread)
    if not logs:
        return None
    half = math.hypot(math.sqrt(math.fsum(squares)) / len(logs), math.log1p(spread))
    mean = geometric_mean(logs)
    return Lead(over, mean, mean * math.exp(-half), mean * math.exp(half))


def _eager(won: Sequence[Winners], metric: ChosenMetric, spreads: Spreads) -> tuple[dict[str, int], int]:
    """Return in how many rows another backend is surely faster by the timer `event`, and how many rows have its times.

    That timer sees what a plain loop in Python does, the host's gaps included; the ranking one sees the device alone.
    """
    if metric.name != "time_us":
        return {}, 0
    counts, rows = Counter[str](), 0
    for case in won:
        by_event = ChosenMetric("event_time_us", case.direction)
        by_loop = cells_of([row.cell.result for row in case.group], by_event)
        cells = {cell.result.label: cell for cell in by_loop if cell.value is not None}
        if len(cells) < 2:
            continue
        rows += 1
        first = min(cells.values(), key=lambda cell: rank(cell, by_event))
        best = [cells[label] for label in case.labels if label in cells]
        if first.result.label not in case.labels and best:
            counts[first.result.label] += all(_faster(first, winner, by_event, spreads) for winner in best)
    return {label: count for label, count in counts.items() if count}, rows


def _faster(cell: Cell, over: Cell, metric: ChosenMetric, spreads: Spreads) -> bool:
    log = gain(cell, over, metric)
    spread = max(_EVENT_SPREAD, spreads.between_rows(cell.result, over.result))
    return log is not None and log > uncertainty(cell, over, spread).half
