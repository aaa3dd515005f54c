"""Rank the backends of a sweep, case by case and pass by pass."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attn_exp.compare.again import again, comparing, settling
from attn_exp.compare.comparison import Comparison, summarize_sweep
from attn_exp.compare.duel_command import Duel, duels
from attn_exp.compare.join import comparable_groups, latest
from attn_exp.compare.page_parts import case_part, case_values, cell_values, value_columns
from attn_exp.compare.ranking import (
    Ranking,
    SettledPair,
    by_group,
    doubt_notes,
    is_label,
    open_pair,
    outcome,
    ranked,
    settled_pairs,
)
from attn_exp.compare.ratio import Spreads, gain, geometric_mean
from attn_exp.compare.rule import best
from attn_exp.compare.settled import Settlements
from attn_exp.compare.sheet import Column, Sheet, Tone, interval
from attn_exp.compare.takeaway import Answer, answer_of
from attn_exp.core.case import PASSES
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.flags import flag_marks
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.fields import fields, getter, sortable
from attn_exp.results.read import Sweep
from attn_exp.results.result import Result


@dataclass(frozen=True, slots=True)
class Mean:
    """The geometric mean of one backend's gains in one pass, over the cases of one group (`by=`).

    `least` and `most` are the extremes and not an uncertainty: the cases are a choice, not a sample. `best` counts the
    cases in which the backend is surely the best, as the answer does. `left_out` counts cases without a gain by
    reason; `n` and these add up to all cases of the group.
    """

    group: tuple[Any, ...]
    direction: str
    label: str
    value: float | None
    least: float | None
    most: float | None
    n: int
    best: int
    left_out: tuple[tuple[str, int], ...]

    @property
    def cases(self) -> int:
        """All cases of the group."""
        return self.n + sum(count for _, count in self.left_out)


def means(rows: Sequence[Ranking], labels: Sequence[str], by: Sequence[str], baseline: str | None) -> tuple[Mean, ...]:
    """Return the means over all cases, or over those of each combination of the fields in `by`.

    Raises:
        UserError: `by` names an unknown field.
    """
    cells = [row.cell for row in rows]
    known = fields(cells) if by else {}
    getters = [getter(name, known, "by=") for name in by]
    # A group has one case, so its first cell has the value of every field that is not the backend's own.
    groups: dict[tuple[tuple[Any, ...], str], dict[int, dict[str, Ranking]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        where = tuple(get(row.cell) for get in getters)
        groups[where, row.cell.direction][row.group].setdefault(row.cell.result.label, row)
    sure = {index for cases in groups.values() for index, case in cases.items() if outcome([*case.values()]) == "sure"}
    every = [
        _mean(where, direction, label, cases, baseline, sure)
        for (where, direction), cases in groups.items()
        for label in labels
        if any(label in case for case in cases.values())
    ]
    # Means over fewer cases stand below the others.
    every.sort(key=lambda mean: (*map(sortable, mean.group), PASSES.index(mean.direction), -mean.n, -_of(mean)))
    return tuple(every)


def _mean(
    where: tuple[Any, ...],
    direction: str,
    label: str,
    cases: "dict[int, dict[str, Ranking]]",
    baseline: str | None,
    sure: set[int],
) -> Mean:
    logs, left_out, best = [], Counter[str](), 0
    for index, case in cases.items():
        row = case.get(label)
        best += row is not None and row.best and index in sure
        base = _base(case, baseline)
        if row is not None and row.gain is not None and not row.doubt and not (base and base.doubt):
            logs.append(math.log(row.gain.value))
        else:
            left_out[_why(row, base, baseline)] += 1
    value = geometric_mean(logs) if logs else None
    least, most = (math.exp(min(logs)), math.exp(max(logs))) if logs else (None, None)
    return Mean(where, direction, label, value, least, most, len(logs), best, tuple(sorted(left_out.items())))


def _base(case: "dict[str, Ranking]", baseline: str | None) -> "Ranking | None":
    return next((row for label, row in case.items() if is_label(label, baseline)), None) if baseline else None


def _why(row: "Ranking | None", base: "Ranking | None", baseline: str | None) -> str:
    if row is None:
        return "not measured"
    if row.cell.value is None:
        return row.cell.result.status if row.cell.result.status != "ok" else "without this metric"
    if row.doubt:
        return row.doubt
    if baseline is None:
        return "the best is 0"
    if base is None:
        return f"{baseline} not measured"
    if base.doubt:
        return f"{baseline} {base.doubt}"
    if base.cell.result.status == "ok":
        return f"{baseline} is 0" if base.cell.value == 0 else f"{baseline} without this metric"
    return f"{baseline} {base.cell.result.status}"


def _of(mean: Mean) -> float:
    return mean.value or 0.0


# Properties in which rows of one sweep may differ, which separates them into groups.
_UNLIKE: dict[str, Callable[[Result], str]] = {
    "devices": lambda result: result.device_name,
    "power limits": lambda result: str(result.environment.get("power_limit_w")),
    "timers": lambda result: result.measuring.timer,
    "regimes": lambda result: result.measuring.regime,
    "kinds of inputs": lambda result: result.measuring.inputs,
    "methods": lambda result: result.method_version,
    "states of the L2 cache": lambda result: result.l2,
}

# Those of them that one sweep may vary, under the names that `by=` uses.
_WAYS: dict[str, Callable[[Result], str]] = {
    "device": lambda result: result.device,
    "timer": _UNLIKE["timers"],
    "regime": _UNLIKE["regimes"],
    "l2": lambda result: result.measuring.l2,
    "inputs": _UNLIKE["kinds of inputs"],
}


_STAR = "* best: {}, and every row too close to it to call"
_OPEN, _DUEL = "no row of a case and pass is best where one in doubt (?) may be", ": a duel decides"
_POWER = (
    "no duel decides this: its rivals take turns faster than energy is counted; longer passes narrow the intervals: "
    "stopping.min_rounds=200 stopping.max_rounds=200 stopping.budget_s=3"
)
_SAME = "same kernel: these backends ran one and the same kernel, so that they differ by noise (A/A)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Rivals(Comparison):
    """A sweep's backends, ranked.

    `rows` are grouped by case and pass, cases in the order of their sizes. `ties` are, of each group that is not
    decided, the two best that are too close to call, or the best and a row in doubt that may be better, with the duel
    that would decide; those first in which most is at stake. `settled` are the pairs of which duels decided. `spreads`
    are what equal rows were taken to differ by.
    """

    baseline: str | None
    rows: tuple[Ranking, ...]
    means: tuple[Mean, ...]
    by: tuple[str, ...]
    answer: Answer
    ties: tuple[Duel, ...]
    spreads: Spreads
    settled: tuple[SettledPair, ...] = ()

    def sheet(self) -> Sheet:
        """Return a row for each cell: its value, and its gain over the baseline or the best."""
        over = f"over {self.baseline}" if self.baseline else "of the best"
        columns = (
            *case_part([row.cell for row in self.rows]),
            Column("pass", "pass"),
            Column("backend", "backend"),
            Column("status", ""),
            *value_columns(self.metric),
            Column("gain", over, "ratio"),
            Column("gain_low", ""),
            Column("gain_high", ""),
            Column("interval", "95 %", joined=interval("gain_low", "gain_high", instead=None), spare=2),
            Column("best", ""),
            # A narrow table omits intervals, but not why there is no value.
            Column("place", "best", joined=_best_or_status),
            Column("doubt", ""),
            Column("same_kernel", "same kernel", spare=4),
            Column("flags", ""),
            Column("second_opinions", ""),
            Column("marks", "marks", spare=1),
            Column("reason", ""),
            Column("job", ""),
            Column("sweep", "sweep" if len(self.sweeps) > 1 else ""),
        )
        rows = [
            (
                *case_values(row.cell),
                row.cell.direction,
                row.cell.result.label,
                row.cell.result.status,
                *cell_values(row.cell, self.metric),
                *((row.gain.value, row.gain.low, row.gain.high) if row.gain else (None, None, None)),
                None,
                "*" if row.best else "?" if row.doubt else "",
                None,
                row.doubt,
                " ".join(row.same),
                " ".join(row.cell.flags),
                "; ".join(row.cell.result.second_opinions),
                flag_marks(row.cell.flags),
                row.cell.result.reason or "",
                row.cell.result.job,
                row.cell.result.sweep,
            )
            for row in self.rows
        ]
        tones: list[Tone] = ["bad" if row.cell.value is None else "best" if row.best else "" for row in self.rows]
        return Sheet("rows", "", columns, tuple(rows), tuple(tones))


def _best_or_status(values: dict[str, Any]) -> str:
    """Return the mark of a row that is or may be the best, or the status of one without a result."""
    return str(values["best"] if values["status"] == "ok" else values["status"])


def compare_rivals(
    sweeps: Sequence[Sweep],
    cells: Sequence[Cell],
    metric: ChosenMetric,
    spreads: Spreads,
    *,
    baseline: str | None = None,
    by: tuple[str, ...] = (),
    notes: Sequence[str] = (),
    duels_of: Callable[[], Settlements] = Settlements,
) -> Rivals:
    """Rank the backends of one or several sweeps by the selected cells.

    What these leave open by a time or rate, duels may have decided; `duels_of` reads them.

    Raises:
        UserError: there is no such baseline.
    """
    labels = sorted({cell.result.label for cell in cells})
    if baseline is not None and not any(is_label(label, baseline) for label in labels):
        raise UserError(
            f"there is no baseline={baseline}: {nearest(baseline, labels)}the backends are {', '.join(labels)}"
        )
    cells, repeated = latest(cells)
    groups = comparable_groups(cells)
    # Means are not taken over groups that are not comparable.
    ways = {name: {get(cell.result) for cell in cells} for name, get in _WAYS.items() if name not in by}
    by = (*by, *(name for name, seen in ways.items() if len(seen) > 1))

    def ranking(settlements: Settlements) -> list[Ranking]:
        ranks = (ranked(group, at, metric, spreads, baseline, settlements) for at, group in enumerate(groups))
        return [row for rows in ranks for row in rows]

    rows = ranking(Settlements())
    summaries = tuple(summarize_sweep(sweep) for sweep in sweeps)
    ties = _ties(rows, metric)
    if ties and (settlements := duels_of()):
        rows = ranking(settlements)
        ties = _ties(rows, metric)
    settled = settled_pairs(rows)
    answer = answer_of(
        rows, metric, spreads, ties, settled=settled, settle_all=settling(summaries), comparing=comparing(summaries)
    )
    if answer.warning and not answer.rules:
        answer = replace(answer, again=again(summaries, longer=answer.longer))
    return Rivals(
        metric=metric,
        sweeps=summaries,
        broken=tuple(sentence for sweep in sweeps for sentence in sweep.broken),
        notes=(
            *([_STAR.format(best(metric))] if any(row.best for row in rows) else ()),
            *doubt_notes([row.doubt for row in rows if row.cell.value is not None]),
            *([_OPEN + _DUEL * metric.settled_by_duels] if any(row.challenge for row in rows) else ()),
            *([_POWER] if metric.kind.of_power and answer.undecided else ()),
            *([_SAME] if any(row.same for row in rows) else ()),
            *notes,
            *repeated,
            *_mixed(groups),
        ),
        baseline=baseline,
        rows=tuple(rows),
        means=means(rows, labels, by, baseline),
        by=by,
        answer=answer,
        ties=ties,
        spreads=spreads,
        settled=settled,
    )


def _ties(rows: Sequence[Ranking], metric: ChosenMetric) -> tuple[Duel, ...]:
    """Return the duels of what is undecided, those first in which most is at stake: the difference, in both passes.

    There are none where a duel would not tell.
    """
    if not metric.settled_by_duels:
        return ()
    pairs = [pair for group in by_group(rows) if (pair := open_pair(group, metric)) is not None]
    found = list(zip(duels([(one.cell, two.cell) for one, two in pairs]), pairs, strict=True))
    stakes: dict[str, float] = defaultdict(float)
    for duel, (one, two) in found:
        stakes[duel.command] += abs(gain(one.cell, two.cell, metric) or 0.0)

    def least_at_stake(each: tuple[Duel, tuple[Ranking, Ranking]]) -> tuple[float, float]:
        # What differs by less than a tenth of a percent is sorted by size: a longer call is measured more precisely.
        return -round(stakes[each[0].command], 3), -(each[0].a.value or 0.0)

    return tuple(duel for duel, _ in sorted(found, key=least_at_stake))


def _mixed(groups: Sequence[Sequence[Cell]]) -> list[str]:
    """Return a note for each property in which rows differ, which is why they are in several groups."""
    results = {id(cell.result): cell.result for group in groups for cell in group if cell.result.status == "ok"}
    notes = []
    for what, get in _UNLIKE.items():
        counts = Counter(get(result) for result in results.values())
        if len(counts) > 1:
            each = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
            notes.append(f"several {what}: {each}; rows are only compared within one of them")
    apart = sum(len({cell.result.environment.get("gpu_uuid") for cell in group if cell.value}) > 1 for group in groups)
    if apart:
        notes.append(f"rivals of {apart} cases ran on different GPUs of one model, which may differ by 2 %")
    return notes
