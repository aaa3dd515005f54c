"""Choosing the fewest rules for ranked rows: which cases share a pick, by how much it leads, and what is open there."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attn_exp.compare.features import features_of
from attn_exp.compare.join import machine, method_key
from attn_exp.compare.ranking import WIDE, Ranking, challengers, leader, outcome, picks
from attn_exp.compare.ratio import Spreads, gain, geometric_mean
from attn_exp.compare.rule import Rule, and_text
from attn_exp.compare.rules import Example, Part, fewest
from attn_exp.core.case import PASSES
from attn_exp.core.interval import Uncertainty, combined
from attn_exp.core.text import plain
from attn_exp.results.cell import ChosenMetric
from attn_exp.results.fields import distinct, sortable

# What undecided cases have in common, as a label that no backend has.
_OPEN = ""


def rules_of(groups: Sequence[list[Ranking]], metric: ChosenMetric, spreads: Spreads) -> tuple[Rule, ...]:
    """Return the fewest rules for the groups, of a case and pass each: sure picks first, and what is open last."""
    features = features_of([group[0] for group in groups])
    examples = [
        Example(feature, *_best_and_perhaps(group, metric)) for feature, group in zip(features, groups, strict=True)
    ]
    rules = [_rule(part, examples, groups, metric, spreads) for part in fewest(examples)]
    return tuple(sorted(rules, key=lambda rule: rule.order))


def case_of(row: Ranking) -> tuple[Any, ...]:
    """Return what identifies the case of a row, whose passes are several groups."""
    result = row.cell.result
    return result.case, method_key(result), machine(result)


def _best_and_perhaps(group: Sequence[Ranking], metric: ChosenMetric) -> tuple[frozenset[str], frozenset[str]]:
    """Return the labels that are among the best of a group; and, where that is open, those that may be.

    The leader is among these unless a row in doubt surely beats it.
    """
    if outcome(group) != "open":
        return picks(group), frozenset()
    first, may = leader(group, metric), challengers(group)
    if first is not None and not any(row.challenge is not None and row.challenge.low > 1 for row in may):
        may += [row for row in group if row is first or row.cell.result.label in first.same]
    return frozenset(), frozenset({_OPEN, *(row.cell.result.label for row in may)})


def _rule(
    part: Part, examples: Sequence[Example], groups: Sequence[list[Ranking]], metric: ChosenMetric, spreads: Spreads
) -> Rule:
    own = [groups[at] for at in part.indices]
    outcomes = [outcome(group) for group in own]
    cases = [{row.cell.result.label: row for row in group} for group in own]
    undecided = Rule(
        where=_words(part, examples),
        wins=outcomes.count("sure"),
        close=outcomes.count("close"),
        open=outcomes.count("open"),
        n=len(own),
        cases=len({case_of(group[0]) for group in own}),
        **_doubt([group for group, one in zip(own, outcomes, strict=True) if one == "open"], metric),
    )
    if _OPEN in part.best:
        return undecided

    def lead(label: str) -> float:
        firsts = [leader(group, metric) for group in own]
        logs = [gain(case[label].cell, one.cell, metric) or 0.0 for case, one in zip(cases, firsts, strict=True) if one]
        return geometric_mean(logs)

    label, *others = sorted(part.best, key=lambda one: (-lead(one), one))
    same = tuple(one for one in others if all(one in case[label].same for case in cases))
    equal = tuple(one for one in others if one not in same and all(one in case[label].equal for case in cases))
    ties = tuple(one for one in others if one not in (*same, *equal))
    every = {one for case in cases for one, row in case.items() if row.cell.value is not None}
    rest = every - {label, *same, *equal} or every - {label, *same}
    next_best = sorted(rest - set(ties) or rest)
    found = [(over, known) for over in next_best if (known := _over(label, over, cases, metric, spreads)) is not None]
    # The best of the others is the one over which the lead is smallest; of those that were measured in most cases.
    over, lead_over = min(found, key=lambda one: (2 * one[1].n < len(cases), one[1].log), default=(None, None))
    ratio, low, high = (None, None, None) if lead_over is None else lead_over.times
    return replace(
        undecided,
        label=label,
        same=same,
        equal=equal,
        ties=ties,
        over=over,
        over_next=len(next_best) > 1,
        ratio=ratio,
        low=low,
        high=high,
        without=sum(over not in case or case[over].cell.value is None for case in cases) if over else 0,
        compared=lead_over.n if lead_over else 0,
        by_pass=lead_over.by_pass if lead_over else (),
    )


def _doubt(groups: Sequence[list[Ranking]], metric: ChosenMetric) -> dict[str, Any]:
    """Return what a rule says of the groups that are open: who may be better than whom, by how much at most, and why.

    Where each row of a group is in doubt, there is none to be better than.
    """
    found: dict[str, float] = defaultdict(float)
    than, reasons = set[str](), set[str]()
    led = [(group, one) for group in groups if (one := leader(group, metric)) is not None and not one.doubt]
    for group, one in led:
        than.add(one.cell.result.label)
        for row in challengers(group):
            label, ratio = row.cell.result.label, row.challenge.value if row.challenge else 0.0
            found[label] = max(found[label], ratio)
            reasons.add(row.doubt)
    if not led:
        for group in groups:
            reasons.update(row.doubt for row in group if row.doubt)
            if (one := leader(group, metric)) is not None:
                found[one.cell.result.label] = 1.0
    return {
        "perhaps": tuple(sorted(found, key=lambda one: (-found[one], one))),
        "than": tuple(sorted(than)),
        "doubts": tuple(sorted(reasons)),
        "lead": max(found.values(), default=None),
    }


@dataclass(frozen=True)
class _Lead:
    """By how much one backend is better than another.

    Attributes:
        logs: how many times in each case, as logarithms, by pass.
        own: the uncertainties of all rows.
        spread: the most that equal rows differ by.
    """

    logs: Mapping[str, Sequence[float]]
    own: Sequence[Uncertainty]
    spread: float

    @property
    def n(self) -> int:
        """In how many passes of cases."""
        return sum(map(len, self.logs.values()))

    @property
    def log(self) -> float:
        """The mean of all."""
        return math.fsum(itertools.chain(*self.logs.values())) / self.n

    @property
    def half(self) -> float:
        """The half-width of its interval: rows' own averages out over cases, what equal rows differ by does not."""
        own = combined(self.own)
        return combined([Uncertainty(own.half / self.n, own.degrees), Uncertainty(math.log1p(self.spread))]).half

    @property
    def times(self) -> tuple[float, float, float]:
        """How many times better in the mean, with its 95 % interval."""
        log, half = self.log, self.half
        return math.exp(log), math.exp(log - half), math.exp(log + half)

    @property
    def by_pass(self) -> tuple[tuple[str, float], ...]:
        """How many times in each pass, in the geometric mean; empty if there is one pass."""
        several = len(self.logs) > 1
        return tuple((name, geometric_mean(self.logs[name])) for name in PASSES if name in self.logs and several)


def _over(
    label: str, over: str, cases: Sequence[Mapping[str, Ranking]], metric: ChosenMetric, spreads: Spreads
) -> _Lead | None:
    """Return by how much `label` is better than `over`, None if that is known in no case.

    What a duel decided counts in place of the two rows. For a row in doubt stands another one that ran its kernel, and
    one that is surely worse counts if only its interval is wide.
    """
    logs, own, spread = defaultdict[str, list[float]](list), list[Uncertainty](), 0.0
    for case in cases:
        row, other = case[label], case.get(over)
        if (duel := row.duels.get(over)) is not None:
            logs[row.cell.direction].append(math.log(duel.value))
            own.append(Uncertainty((math.log(duel.high) - math.log(duel.low)) / 2))
            continue
        row = next((case[one] for one in (label, *row.same) if one in case and not case[one].doubt), row)
        if other is None or row.doubt or over in row.same:
            continue
        if other.doubt and (other.challenge is not None or other.doubt not in WIDE):
            continue
        log = gain(row.cell, other.cell, metric)
        if log is None:
            continue
        logs[row.cell.direction].append(log)
        own += [row.cell.uncertainty, other.cell.uncertainty]
        spread = max(spread, spreads.between_rows(row.cell.result, other.cell.result))
    return _Lead(logs, own, spread) if logs else None


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
        parts.append(words(name, values) + (f" (only with {and_text(others)})" if others else ""))
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
