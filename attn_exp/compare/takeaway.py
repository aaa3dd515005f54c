"""The answer of a sweep: which backend to take for which cases, by how much, and what is open.

A sweep's end, `attn-exp compare`, reports and MLflow show the same `Answer`.
"""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_exp.compare.cautions import Caution, cautions_of
from attn_exp.compare.choosing import case_of, rules_of
from attn_exp.compare.duel_command import Duel
from attn_exp.compare.ranking import WIDE, Ranking, SettledPair, by_group, deciding_nothing, outcome, picks
from attn_exp.compare.ratio import Spreads
from attn_exp.compare.rule import Rule, and_text, counted
from attn_exp.core.case import PASSES
from attn_exp.results.cell import ChosenMetric

# Of the rules, above tables and at a sweep's end; the sheet of a comparison has all.
RULES_SHOWN = 8
# With more rules, a sentence for each pass before them counts in how many cases a backend is the best, the first few of
# them.
_COUNTED_FROM, _COUNTED_MOST = 4, 4
_DUELS_SHOWN = 3
_DECIDED = "is decided: nothing needs to be measured again"


@dataclass(frozen=True, slots=True)
class Tally:
    """How the cases of one pass are decided; each of the `n` is counted once.

    In `picks` by the backend that is surely the best; in `close`, where two or more are too close to call; in `open`,
    where a row in doubt may be better than the best of the others; or in `single`, where fewer than two backends have a
    result.
    """

    direction: str
    picks: Mapping[str, int]
    close: int
    open: int
    single: int

    @property
    def n(self) -> int:
        """All cases of the pass."""
        return sum(self.picks.values()) + self.close + self.open + self.single

    def sentence(self, metric: ChosenMetric) -> str:
        """Return the counts: `8 cases: surely fastest: flash in 6, eager in 1; 1 too close to call`."""
        order = sorted(self.picks, key=lambda label: (-self.picks[label], label))
        each = [f"{label} in {self.picks[label]}" for label in order[:_COUNTED_MOST]]
        if rest := order[_COUNTED_MOST:]:
            each.append(f"{len(rest)} more in {sum(self.picks[label] for label in rest)}")
        best = "fastest" if metric.kind.follows_clock else f"best by {metric}"
        parts = [f"surely {best}: {', '.join(each)}"] if each else []
        parts += [
            f"{count} {words}"
            for count, words in (
                (self.close, "too close to call"),
                (self.open, "undecided (rows in doubt)"),
                (self.single, "with fewer than two results"),
            )
            if count
        ]
        return f"{counted(self.n, self.n)}: {'; '.join(parts)}"


@dataclass(frozen=True)
class Answer:
    """Which backend to take where: `rules`, the fewest that say it. `warning` says why there are none, or fewer.

    `tallies` count each pass of the `cases` once; the `wins`, `close` and `open` of the rules add up to the same
    numbers. `by_duels` are the passes that duels decided, a sentence each, and `cautions` what flags of rows mean for
    the picks. `settle` is the duel that would decide the undecided pass in which most is at stake, and `settle_all` the
    command that runs all such duels. `longer` says that without a pick more time would help, and `again` is the command
    that then measures the sweep once more.
    """

    metric: ChosenMetric
    rules: tuple[Rule, ...] = ()
    warning: str = ""
    by_duels: tuple[str, ...] = ()
    cautions: tuple[Caution, ...] = ()
    tallies: tuple[Tally, ...] = ()
    cases: int = 0
    settle: Duel | None = None
    settle_all: str = ""
    longer: bool = False
    again: str = ""

    def __str__(self) -> str:
        return "\n".join(self.lines() or ["there is nothing to compare: fewer than two backends have a result"])

    def _repr_html_(self) -> str:
        return f"<pre style='white-space: pre-wrap'>{html.escape(str(self))}</pre>"

    @property
    def n(self) -> int:
        """All passes of all cases."""
        return sum(tally.n for tally in self.tallies)

    @property
    def undecided(self) -> int:
        """In how many passes a duel is needed: those too close to call, and those that are open."""
        return sum(tally.close + tally.open for tally in self.tallies)

    def lines(self, most: int | None = RULES_SHOWN) -> list[str]:
        """Return the answer as sentences, of the rules the first `most`, then the doubts, and what to do next.

        A warning comes first where it says that there is no pick. Else it would take the place of the answer where
        there is room for few lines, as in MLflow.
        """
        doubts = [*filter(None, [self.warning]), *(line for one in self.cautions for line in one.lines())]
        return [*self.said(most), *doubts, *filter(None, self.next_step())]

    def said(self, most: int | None = RULES_SHOWN) -> list[str]:
        """Return the first `most` of the rules as sentences, sure picks first, behind the tallies if there are many."""
        shown = self.rules[:most]
        hidden = self.rules[len(shown) :]
        decides = and_text(
            [
                f"{count} {words}"
                for count, words in (
                    (sum(rule.order == 0 for rule in hidden), "sure"),
                    (sum(rule.order == 1 for rule in hidden), "too close to call"),
                    (sum(rule.order == 2 for rule in hidden), "undecided"),
                )
                if count
            ]
        )
        # One interval says of which level all are.
        first = next((rule for rule in shown if rule.has_interval), None)
        return [
            *(self._tallied() if len(self.rules) >= _COUNTED_FROM else ()),
            *(rule.sentence(self.metric, level=rule is first) for rule in shown),
            *([f"... and {len(hidden)} more such rules ({decides})"] if hidden else []),
            *([f"decided by duels: {'; '.join(duels)}"] if (duels := self._duels(most)) else []),
        ]

    def _tallied(self) -> list[str]:
        """Return the tallies as sentences, passes with the same one together."""
        passes: dict[str, list[str]] = {}
        for one in self.tallies:
            passes.setdefault(one.sentence(self.metric), []).append(one.direction)
        return [f"{and_text(directions)}, {said}" for said, directions in passes.items()]

    def _duels(self, most: int | None) -> list[str]:
        shown = self.by_duels[: None if most is None else _DUELS_SHOWN]
        rest = len(self.by_duels) - len(shown)
        return [*shown, *([f"and {rest} more"] if rest else [])]

    def next_step(self) -> tuple[str, str]:
        """Return what is open, and the command that would settle it; the latter is empty if nothing is.

        Both are empty where nothing is compared, and where no command is known that would help.
        """
        if self.again:
            return "once more, as another sweep:", self.again
        if self.settle is None:
            which = "every case with two results" if any(one.single for one in self.tallies) else "every case"
            return f"{which} {_DECIDED}" if self.rules and not self.undecided else "", ""
        pair = f"{self.settle.a.result.label} and {self.settle.b.result.label}"
        said = f"not decided in {self.undecided} of {counted(self.cases, self.n)}"
        if self.undecided == 1:
            return f"{said} ({pair}); to settle it:", self.settle.command
        every = f" (all: {self.settle_all})" if self.settle_all else ""
        return f"{said}; to settle the one with most at stake, {pair}{every}:", self.settle.command


def answer_of(
    rows: Sequence[Ranking],
    metric: ChosenMetric,
    spreads: Spreads,
    open_duels: Sequence[Duel],
    *,
    settled: Sequence[SettledPair] = (),
    settle_all: str = "",
    comparing: str = "",
) -> Answer:
    """Return the answer that the ranked rows of all cases give.

    Args:
        rows: of all cases and passes.
        metric: what they are ranked by.
        spreads: how much equal rows differ.
        open_duels: what would decide the undecided ones; first where most is at stake.
        settled: what duels decided.
        settle_all: the command that runs all open ones; empty if it is unknown, as is `comparing`.
        comparing: the command that compares these rows.
    """
    valued = [row for row in rows if row.cell.value is not None]
    if len({row.cell.result.label for row in valued}) < 2:
        return Answer(metric)
    doubtful = [row for row in valued if row.doubt]
    most = 2 * len(doubtful) > len(valued)
    groups = [(group, outcome(group)) for group in by_group(rows)]
    return Answer(
        metric=metric,
        rules=() if most else rules_of([group for group, found in groups if found != "single"], metric, spreads),
        warning=_warning(valued, doubtful, most),
        by_duels=tuple(
            f"{(cell := pair.row.cell).result.case.brief()} {cell.direction}: {pair.said}" for pair in settled
        ),
        cautions=() if most else cautions_of([group for group, found in groups if found == "sure"], metric, comparing),
        longer=most and _wants_time(doubtful),
        tallies=tuple(
            _tally(direction, own)
            for direction in PASSES
            if (own := [one for one in groups if one[0][0].cell.direction == direction])
        ),
        cases=len({case_of(group[0]) for group, _ in groups}),
        settle=None if most or not open_duels else open_duels[0],
        settle_all=settle_all,
    )


def _tally(direction: str, groups: Sequence[tuple[Sequence[Ranking], str]]) -> Tally:
    counts = Counter(found for _, found in groups)
    # Names of one kernel are one pick.
    sure = (group for group, found in groups if found == "sure")
    won = Counter("=".join(sorted(picks(group))) for group in sure)
    return Tally(direction, dict(won), counts["close"], counts["open"], counts["single"])


def _warning(valued: Sequence[Ranking], doubtful: Sequence[Ranking], most: bool) -> str:
    if not doubtful:
        return ""
    of = deciding_nothing([row.doubt for row in valued])
    if not most:
        return of
    remedy = (
        "measure longer (stopping=thorough, or a larger stopping.budget_s)"
        if _wants_time(doubtful)
        else "measure again while nothing else runs on the machine"
    )
    return f"NO PICK: {of}; {remedy}"


def _wants_time(doubtful: Sequence[Ranking]) -> bool:
    return sum(row.doubt in WIDE for row in doubtful) > len(doubtful) / 2
