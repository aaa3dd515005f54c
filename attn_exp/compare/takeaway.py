"""The answer of a sweep: which backend to take for which cases, by how much, and what is open.

A sweep's end, `attn-exp compare`, reports and MLflow show the same `Answer`.
"""

import html
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.compare.duel_command import Duel, duels
from attn_exp.compare.features import features_of
from attn_exp.compare.join import machine, method_key
from attn_exp.compare.ranking import Ranking, looks_better, open_pair, rank
from attn_exp.compare.ratio import Spreads, gain, geometric_mean
from attn_exp.compare.rules import Example, Part, fewest
from attn_exp.core.interval import Uncertainty, combined
from attn_exp.core.text import plain
from attn_exp.results.cell import ChosenMetric
from attn_exp.results.fields import distinct, sortable

# Of the rules, above tables and at a sweep's end; the sheet of a comparison has all.
RULES_SHOWN = 8
# With more rules, a sentence before them counts in how many passes each backend is the best, the first few of them.
_COUNTED_FROM, _COUNTED_MOST = 4, 4


@dataclass(frozen=True, slots=True)
class Rule:
    """The backend to take for some cases.

    `where` says which in words, empty for all. `same` are backends that ran the same kernel as `label` there, and
    `ties` those that are too close to it to call in each of the cases. `ratio` is how many times better it is than
    `over`, the best of the others, as a geometric mean over the `n` passes of all `cases`, with its 95 % interval; None
    without others. In `wins` of the passes `over` is worse beyond doubt, and in `without` of them it has no result.
    `perhaps` are backends whose rows are in doubt, for the reasons `doubts`, and look better than `label` in `open` of
    the passes, the first of them `lead` times as a geometric mean. Without an `over` the `doubts` are those of all
    others.
    """

    where: str
    label: str
    same: tuple[str, ...]
    ties: tuple[str, ...]
    over: str | None
    ratio: float | None
    low: float | None
    high: float | None
    wins: int
    n: int
    cases: int
    perhaps: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    lead: float | None = None
    open: int = 0
    without: int = 0

    def sentence(self, metric: ChosenMetric) -> str:
        """Return the rule as hyperfine puts it: `cudnn is 1.27 [1.25, 1.29] times as fast as flash, 12 of 12 cases`."""
        who = f"{self.label} (same kernel: {', '.join(self.same)})" if self.same else self.label
        if self.over is None or self.ratio is None or self.low is None or self.high is None:
            sure = f" that is not in doubt ({', '.join(self.doubts)})" if self.doubts else ""
            said = f"only {who} has a result{sure}, {_counted(self.cases)}"
        else:
            times = f"{_times(self.ratio)} [{_times(self.low)}, {_times(self.high)}] times"
            better = "as fast as" if metric.kind.follows_clock else f"better by {metric} than"
            compared = f"{times} {better} {self.over}"
            surely = "surely in " if self.wins + self.without < self.n else ""
            said = f"{who} is {compared}, {surely}{_of(self.wins, self.n, self.cases)}"
            said += f" ({self.over} has no result in {self.without})" if self.without else ""
            # Where none is surely worse and the interval holds 1, nothing is decided either.
            if ties := self.ties or ((self.over,) if not self.wins and self.low < 1 else ()):
                close = f"{who} and {_and(ties)} are too close to call"
                said = f"{close}, {_counted(self.cases)}; {self.label} is {compared}"
        if self.perhaps and self.lead is not None:
            better = "as fast as" if metric.kind.follows_clock else f"better by {metric} than"
            most = "looks" if len(self.perhaps) == 1 else "look up to"
            looks = f"{_and(self.perhaps)} {most} {_times(self.lead)} times {better} {self.label}"
            looks += f" ({', '.join(self.doubts)})"
            part = "" if self.open == self.n else f"in {_of(self.open, self.n, self.cases)} "
            said = f"{said}; {part}{looks}" if part else f"undecided: {looks}; {said}"
        return f"{self.where}: {said}" if self.where else said


@dataclass(frozen=True)
class Answer:
    """Which backend to take where: `rules`, the fewest that say it. `warning` says why there are none, or fewer.

    `tally` says in how many passes each backend is among the best, for a reader of many rules. `close` counts the
    passes, of all `n` of the `cases`, in which two are too close to call, or one in doubt looks better than the best,
    and `settle` is the duel that would decide the pair that is so most often, on its largest case. `longer` says that
    without a pick more time would help, and `again` is the command that then measures the sweep once more.
    """

    metric: ChosenMetric
    rules: tuple[Rule, ...] = ()
    warning: str = ""
    tally: str = ""
    close: int = 0
    n: int = 0
    cases: int = 0
    settle: Duel | None = None
    longer: bool = False
    again: str = ""

    def __str__(self) -> str:
        return "\n".join(self.lines() or ["there is nothing to compare: fewer than two backends have a result"])

    def _repr_html_(self) -> str:
        return f"<pre style='white-space: pre-wrap'>{html.escape(str(self))}</pre>"

    def lines(self, most: int | None = RULES_SHOWN) -> list[str]:
        """Return the answer as sentences, of the rules the first `most`, the warning, and a command.

        The warning comes first where it says that there is no pick. Else it would take the place of the answer where
        there is room for few lines, as in MLflow.
        """
        return [*self.said(most), *filter(None, [self.warning]), *self.open_lines()]

    def said(self, most: int | None = RULES_SHOWN) -> list[str]:
        """Return the first `most` of the rules as sentences, behind the tally if there are many."""
        shown = self.rules[:most]
        rest = len(self.rules) - len(shown)
        return [
            *([self.tally] if len(self.rules) >= _COUNTED_FROM else []),
            *(rule.sentence(self.metric) for rule in shown),
            *([f"... and {rest} more such rules"] if rest else []),
        ]

    def open_lines(self) -> list[str]:
        """Return what is open, and the command that would settle it; none if nothing is."""
        if self.again:
            return ["once more, as another sweep:", self.again]
        if self.settle is None:
            return []
        which = "it" if self.close == 1 else "the largest (attn-exp compare with settle=true settles all)"
        pair = f"{self.settle.a.result.label} and {self.settle.b.result.label}"
        return [
            f"undecided in {_of(self.close, self.n, self.cases)} ({pair}); to settle {which}:",
            self.settle.command,
        ]


def answer_of(rows: Sequence[Ranking], metric: ChosenMetric, spreads: Spreads) -> Answer:
    """Return the answer that the ranked rows of all cases give."""
    valued = [row for row in rows if row.cell.value is not None]
    if len({row.cell.result.label for row in valued}) < 2:
        return Answer(metric)
    doubtful = [row for row in valued if row.doubt]
    most = 2 * len(doubtful) > len(valued)
    groups: dict[int, list[Ranking]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    decided = [group for group in groups.values() if any(row.best for row in group)]
    rivals = [group for group in decided if len({row.cell.result.label for row in group if row.cell.value}) > 1]
    features = features_of([group[0] for group in rivals])
    examples = [
        Example(
            features[at],
            frozenset(row.cell.result.label for row in group if row.best),
            frozenset(row.cell.result.label for row in group if _looks_best(row, group, metric)),
        )
        for at, group in enumerate(rivals)
    ]
    rules = [] if most else [_rule(part, examples, rivals, metric, spreads) for part in fewest(examples)]
    close, settle = _open(rivals, metric)
    cases = len({_case(group[0]) for group in groups.values()})
    return Answer(
        metric=metric,
        rules=tuple(rules),
        tally=_tally(rivals, cases, metric),
        warning=_warning(valued, doubtful, most, len(groups) - len(decided)),
        longer=most and _wants_time(doubtful),
        close=close,
        n=len(groups),
        cases=cases,
        settle=None if most else settle,
    )


def _tally(groups: Sequence[list[Ranking]], cases: int, metric: ChosenMetric) -> str:
    counts = Counter(row.cell.result.label for group in groups for row in group if row.best)
    order = sorted(counts, key=lambda label: (-counts[label], label))
    each = [f"{label} in {counts[label]}" for label in order[:_COUNTED_MOST]]
    rest = len(order) - len(each)
    others = f", {rest} more in fewer" if rest else ""
    best = "fastest" if metric.kind.follows_clock else f"best by {metric}"
    whole = _counted(cases) if len(groups) == cases else f"{len(groups)} passes of {_counted(cases)}"
    return f"{best}, or too close to it to call: {', '.join(each)}{others}, of {whole}"


def _warning(valued: Sequence[Ranking], doubtful: Sequence[Ranking], most: bool, undecided: int) -> str:
    if not doubtful:
        return ""
    counts = Counter(row.doubt for row in doubtful)
    each = ", ".join(f"{count} {doubt}" for doubt, count in counts.most_common())
    of = f"{len(doubtful)} of {len(valued)} rows decide nothing ({each})"
    if not most:
        left = f"; {undecided} cases are left open by them" if undecided else ""
        return f"{of}{left}"
    remedy = (
        "measure longer (stopping=thorough, or a larger stopping.budget_s)"
        if _wants_time(doubtful)
        else "measure again while nothing else runs on the machine"
    )
    return f"NO PICK: {of}; {remedy}"


def _wants_time(doubtful: Sequence[Ranking]) -> bool:
    return sum(row.doubt in ("unstable", "a wide interval") for row in doubtful) > len(doubtful) / 2


def _looks_best(row: Ranking, group: Sequence[Ranking], metric: ChosenMetric) -> bool:
    """Return whether a row in doubt looks better than each of the best."""
    return all(looks_better(row, other, metric) for other in group if other.best)


def _rule(
    part: Part, examples: Sequence[Example], groups: Sequence[list[Ranking]], metric: ChosenMetric, spreads: Spreads
) -> Rule:
    cases = [{row.cell.result.label: row for row in groups[at]} for at in part.indices]

    def lead(label: str) -> float:
        logs = [gain(case[label].cell, _first(case, metric).cell, metric) or 0.0 for case in cases]
        return geometric_mean(logs)

    label, *others = sorted(part.best, key=lambda one: (-lead(one), one))
    same = tuple(one for one in others if all(one in case[label].same for case in cases))
    ties = tuple(one for one in others if one not in same)
    rest = {one for case in cases for one, row in case.items() if row.cell.value is not None} - {label, *same}
    found = [
        (over, *known)
        for over in sorted(rest - set(ties) or rest)
        if (known := _over(label, over, cases, metric, spreads)) is not None
    ]
    # The best of the others is the one over which the lead is smallest; of those that were measured in most cases.
    best = min(found, key=lambda one: (2 * one[3] < len(cases), one[1]), default=None)
    over, log, half, _ = best if best else (None, 0.0, 0.0, 0)
    better = [[one for one in case.values() if looks_better(one, case[label], metric)] for case in cases]
    logs = defaultdict[str, list[float]](list)
    for case, rows in zip(cases, better, strict=True):
        for row in rows:
            logs[row.cell.result.label].append(gain(row.cell, case[label].cell, metric) or 0.0)
    leads = {one: geometric_mean(found) for one, found in logs.items()}
    doubted = [row for rows in better for row in rows] if over else [row for case in cases for row in case.values()]
    there = [case[over] if over in case and case[over].cell.value is not None else None for case in cases]
    worse = [row is not None and not row.best and not row.doubt for row in there]
    wins = sum(case[label].best and surely for case, surely in zip(cases, worse, strict=True))
    return Rule(
        where=_words(part, examples),
        label=label,
        same=same,
        ties=ties,
        over=over,
        ratio=math.exp(log) if over else None,
        low=math.exp(log - half) if over else None,
        high=math.exp(log + half) if over else None,
        wins=wins,
        n=len(cases),
        cases=len({_case(case[label]) for case in cases}),
        perhaps=tuple(sorted(leads, key=lambda one: (-leads[one], one))),
        doubts=tuple(sorted({row.doubt for row in doubted if row.doubt})),
        lead=max(leads.values(), default=None),
        open=sum(map(bool, better)),
        without=there.count(None) if over else 0,
    )


def _over(
    label: str, over: str, cases: Sequence[Mapping[str, Ranking]], metric: ChosenMetric, spreads: Spreads
) -> tuple[float, float, int] | None:
    """Return the mean log of how many times better `label` is than `over`, its half-width, and in how many cases.

    What rows differ by in themselves averages out over the cases; the spread of equal rows need not.
    """
    logs, own, spread = [], list[Uncertainty](), 0.0
    for case in cases:
        row, other = case[label], case.get(over)
        if other is None or row.doubt or other.doubt or over in row.same:
            continue
        log = gain(row.cell, other.cell, metric)
        if log is None:
            continue
        logs.append(log)
        own += [row.cell.uncertainty, other.cell.uncertainty]
        spread = max(spread, spreads.between_rows(row.cell.result, other.cell.result))
    if not logs:
        return None
    mean_own = combined(own)
    shared = combined([Uncertainty(mean_own.half / len(logs), mean_own.degrees), Uncertainty(math.log1p(spread))])
    return math.fsum(logs) / len(logs), shared.half, len(logs)


def _first(case: Mapping[str, Ranking], metric: ChosenMetric) -> Ranking:
    return min((row for row in case.values() if row.best), key=lambda row: rank(row.cell, metric))


def _open(groups: Sequence[list[Ranking]], metric: ChosenMetric) -> tuple[int, Duel | None]:
    """Return in how many passes it is open which of two is best, and the duel of the pair that is so most often."""
    pairs: dict[tuple[str, str], list[tuple[Ranking, Ranking]]] = defaultdict(list)
    for pair in filter(None, (open_pair(group, metric) for group in groups)):
        pairs[pair[0].cell.result.label, pair[1].cell.result.label].append(pair)
    if not pairs:
        return 0, None
    close = sum(map(len, pairs.values()))
    most = max(pairs.values(), key=len)
    one, two = max(most, key=lambda pair: pair[0].cell.value or 0.0)
    (duel,) = duels([(one.cell, two.cell)])
    return close, duel


def _case(row: Ranking) -> tuple[Any, ...]:
    result = row.cell.result
    return result.case, method_key(result), machine(result)


def _words(part: Part, examples: Sequence[Example]) -> str:
    """Return what singles out the cases of a rule in words: `causal, seq_len from 2048, forward`.

    Features that coincide are named beside: `q_heads 32 (only with head_dim 64)`.
    """

    def words(name: str, values: tuple[Any, ...]) -> str:
        every = sorted(distinct(example.features[name] for example in examples), key=sortable)
        return _condition(name, values, every)

    parts = []
    for name, values in part.where.items():
        others = [words(*one) for one in part.coinciding.get(name, {}).items() if one[0] not in part.where]
        parts.append(words(name, values) + (f" (only with {_and(others)})" if others else ""))
    return ", ".join(parts)


def _condition(name: str, values: Sequence[Any], every: Sequence[Any]) -> str:
    if name == "pass":
        return " and ".join(map(str, values))
    if set(values) <= {True, False} and len(values) == 1 and isinstance(values[0], bool):
        return name if values[0] else f"not {name}"
    if len(values) == 1:
        return f"{name} {plain(values[0]) if values[0] is not None else 'none'}"
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        if values[0] == every[0]:
            return f"{name} up to {values[-1]}"
        return f"{name} from {values[0]}" if values[-1] == every[-1] else f"{name} {values[0]} to {values[-1]}"
    return f"{name} {' or '.join(str(plain(value)) for value in values)}"


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _counted(cases: int) -> str:
    return "1 case" if cases == 1 else f"{cases} cases"


def _of(some: int, passes: int, cases: int) -> str:
    """Return how many passes of some cases: `12 of 12 cases` if each case has one pass, or if it is all of them."""
    if some == passes or passes == cases:
        return f"{min(some, cases)} of {_counted(cases)}"
    return f"{some} of {passes} passes of {_counted(cases)}"


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
