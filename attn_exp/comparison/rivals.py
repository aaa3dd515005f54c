"""Rank the backends of a sweep, case by case and pass by pass."""

import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_exp.comparison.answer_table import answer_table
from attn_exp.comparison.columns import NAMES, case_pairs, row_sheet, value_pairs
from attn_exp.comparison.comparison import Comparison
from attn_exp.comparison.fastest import Answer, answer_of
from attn_exp.comparison.join import WAYS, comparable_groups, latest
from attn_exp.comparison.ranking import Ranking, by_group, is_label, is_tie, open_pair, ranked, winners
from attn_exp.comparison.ratio import TURNS_FLOOR, Spreads, gain, geometric_mean
from attn_exp.comparison.settled import Settlements
from attn_exp.core.case.case import PASSES
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.record.flags import flag_marks
from attn_exp.core.sheet.sheet import MARK, Column, Pairs, Sheet, Tone, interval
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.duel_command import Duel, duels
from attn_exp.results.fields import fields, getter, sortable
from attn_exp.results.read import Sweep
from attn_exp.results.store import sweep_words


@dataclass(frozen=True, slots=True)
class Mean:
    """The geometric mean of one backend's gains in one pass, over the cases of one group (`by=`).

    `least` and `most` are the extremes and not an uncertainty: the cases are a choice, not a sample. `best` counts the
    cases that the backend alone wins, as the answer does, `n` those with a gain, and `cases` all of the group.
    """

    group: tuple[Any, ...]
    direction: str
    label: str
    value: float | None
    least: float | None
    most: float | None
    n: int
    best: int
    cases: int


def means(rows: Sequence[Ranking], labels: Sequence[str], by: Sequence[str], metric: ChosenMetric) -> tuple[Mean, ...]:
    """Return the means over all cases, or over those of each combination of the fields in `by`.

    Raises UserError if `by` names an unknown field.
    """
    cells = [row.cell for row in rows]
    getters_of = fields(cells) if by else {}
    getters = [getter(name, getters_of, "by=") for name in by]
    # A group has one case, so its first cell has the value of every field that is not the backend's own.
    groups: dict[tuple[tuple[Any, ...], str], dict[int, dict[str, Ranking]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        where = tuple(get(row.cell) for get in getters)
        groups[where, row.cell.direction][row.group].setdefault(row.cell.result.label, row)
    won = {
        index: {row.label for row in best}
        for cases in groups.values()
        for index, case in cases.items()
        if (best := winners([*case.values()])) and not is_tie(best)
    }
    every = [
        _mean(where, direction, label, cases, won)
        for (where, direction), cases in groups.items()
        for label in labels
        if any(label in case for case in cases.values())
    ]
    # Means over fewer cases stand below the others.
    every.sort(
        key=lambda mean: (*map(sortable, mean.group), PASSES.index(mean.direction), -mean.n, -(mean.value or 0.0))
    )
    return tuple(every)


def _mean(
    where: tuple[Any, ...],
    direction: str,
    label: str,
    cases: "dict[int, dict[str, Ranking]]",
    won: "dict[int, set[str]]",
) -> Mean:
    best = sum(label in won.get(index, ()) for index in cases)
    gains = (row.gain for case in cases.values() if (row := case.get(label)) is not None)
    logs = [math.log(gain.value) for gain in gains if gain is not None]
    value = geometric_mean(logs) if logs else None
    least, most = (math.exp(min(logs)), math.exp(max(logs))) if logs else (None, None)
    return Mean(where, direction, label, value, least, most, len(logs), best, len(cases))


_POWER = (
    "no duel decides this: its rivals take turns faster than energy is counted; longer passes narrow the intervals: "
    "stopping.min_rounds=200 stopping.max_rounds=200 stopping.budget_s=3"
)
_DUELS = "duels beside the sweep decided what intervals leave too close to call"
_TURNS = f"of rows measured in turns: their rounds' ratio ({100 * TURNS_FLOOR:.1f} % and more)"
_SAME = "same kernel: these backends ran the same kernels, as often; those whose intervals agree are one rival"


@dataclass(frozen=True, kw_only=True, repr=False)
class Rivals(Comparison):
    """A sweep's backends, ranked.

    `rows` are grouped by case and pass, cases in the order of their sizes. `ties` are, of each group with a tie, the
    two fastest, with the duel that would decide; those first in which most is at stake. `table` shows the answer.
    """

    baseline: str | None
    rows: tuple[Ranking, ...]
    means: tuple[Mean, ...]
    by: tuple[str, ...]
    answer: Answer
    table: Sheet
    ties: tuple[Duel, ...]

    def sheet(self) -> Sheet:
        """Return a row for each cell: its value, and its gain over the baseline or the best."""
        over = f"over {self.baseline}" if self.baseline else "of the best"
        pairs: Pairs = (
            *case_pairs(self.rows),
            *NAMES,
            (Column("status", ""), lambda row: row.cell.result.status),
            *value_pairs(self.metric),
            (Column("gain", over, "ratio"), lambda row: row.gain and row.gain.value),
            (Column("gain_low", ""), lambda row: row.gain and row.gain.low),
            (Column("gain_high", ""), lambda row: row.gain and row.gain.high),
            (Column("interval", "95 %", joined=interval("gain_low", "gain_high", instead=None), spare=2), None),
            (Column("best", ""), lambda row: MARK if row.best else ""),
            # A narrow table omits intervals, but not why there is no value.
            (Column("place", "best", joined=lambda row: row["best"] if row["status"] == "ok" else row["status"]), None),
            (Column("same_kernel", "same kernel", spare=4), lambda row: ", ".join(row.kernel)),
            (Column("flags", ""), lambda row: " ".join(row.cell.flags)),
            (Column("second_opinions", ""), lambda row: "; ".join(row.cell.result.second_opinions)),
            (Column("marks", "marks", spare=1), lambda row: flag_marks(row.cell.flags)),
            (Column("reason", ""), lambda row: row.cell.result.reason or ""),
            (Column("job", ""), lambda row: row.cell.result.job),
            (Column("sweep", "sweep" if len(self.sweeps) > 1 else ""), lambda row: row.cell.result.sweep),
        )
        tones: list[Tone] = ["bad" if row.cell.value is None else "best" if row.best else "" for row in self.rows]
        return row_sheet(self.rows, pairs, tones)


def compare_rivals(
    sweeps: Sequence[Sweep],
    cells: Sequence[Cell],
    metric: ChosenMetric,
    spreads: Spreads,
    *,
    baseline: str | None = None,
    by: tuple[str, ...] = (),
    show: str = "auto",
    notes: Sequence[str] = (),
    duels_of: Callable[[], Settlements] = Settlements,
) -> Rivals:
    """Rank the backends of one or several sweeps by the selected cells.

    Duels may have decided differences in a time or rate that the cells leave open; `duels_of` reads them. Raises
    UserError if there is no such baseline.
    """
    labels = sorted({cell.result.label for cell in cells})
    if baseline is not None and not any(is_label(label, baseline) for label in labels):
        raise UserError(
            f"there is no baseline={baseline}: {nearest(baseline, labels)}the backends are {', '.join(labels)}"
        )
    cells, repeated = latest(cells)
    groups = comparable_groups(cells)
    # Means are not taken over groups that are not comparable.
    ways = {
        name: {get(cell.result) for cell in cells if cell.value is not None}
        for name, get in WAYS.items()
        if name not in by
    }
    by = (*by, *(name for name, seen in ways.items() if len(seen) > 1))

    def ranking(settlements: Settlements) -> list[Ranking]:
        ranks = (ranked(group, at, metric, spreads, baseline, settlements) for at, group in enumerate(groups))
        return [row for rows in ranks for row in rows]

    rows = ranking(Settlements())
    ties = _ties(rows, metric)
    if ties and (settlements := duels_of()):
        rows = ranking(settlements)
        ties = _ties(rows, metric)
    answer = answer_of(rows, metric, spreads, ties, settling(sweeps))
    return Rivals(
        metric=metric,
        sweeps=tuple(sweeps),
        notes=(
            *([_POWER] if metric.kind.of_power and answer.ties else ()),
            *([_SAME] if any(row.kernel for row in rows) else ()),
            *([_DUELS] if any(row.duels for row in rows) else ()),
            *notes,
            *([_TURNS] if any(row.cell.turns and row.cell.turns.links for row in rows) else ()),
            *repeated,
            *_apart(groups),
        ),
        baseline=baseline,
        rows=tuple(rows),
        means=means(rows, labels, by, metric),
        by=by,
        answer=answer,
        table=answer_table(rows, metric, show),
        ties=ties,
    )


def _ties(rows: Sequence[Ranking], metric: ChosenMetric) -> tuple[Duel, ...]:
    """Return the duels of ties, those first in which most is at stake: the difference, in both passes."""
    if not metric.settled_by_duels:
        return ()
    pairs = [pair for group in by_group(rows) if (pair := open_pair(group)) is not None]
    open_duels = list(zip(duels([(row.cell, rival.cell) for row, rival in pairs]), pairs, strict=True))
    stakes: dict[str, float] = defaultdict(float)
    for duel, (row, rival) in open_duels:
        stakes[duel.command] += abs(gain(row.cell, rival.cell, metric) or 0.0)

    def least_at_stake(each: tuple[Duel, tuple[Ranking, Ranking]]) -> tuple[float, float]:
        # Stakes within a tenth of a percent are sorted by size: a longer call is measured more precisely.
        return -round(stakes[each[0].command], 3), -(each[0].a.value or 0.0)

    return tuple(duel for duel, _ in sorted(open_duels, key=least_at_stake))


def _apart(groups: Sequence[Sequence[Cell]]) -> list[str]:
    """Return a note if rivals ran on several GPUs of one model."""
    apart = sum(len({cell.result.environment.get("gpu_uuid") for cell in group if cell.value}) > 1 for group in groups)
    return [f"rivals of {apart} cases ran on different GPUs of one model, which may differ by 2 %"] if apart else []


def comparing(sweeps: Sequence[Sweep]) -> str:
    """Return the command that compares the only sweep of a comparison; empty if it is not in a folder."""
    if len(sweeps) != 1 or not Path(sweeps[0].place).is_dir():
        return ""
    return shlex.join(["attn-exp", "compare", *sweep_words(Path(sweeps[0].place))])


def settling(sweeps: Sequence[Sweep]) -> str:
    """Return the command that runs the duels of the only sweep of a comparison; empty if it is not in a folder."""
    command = comparing(sweeps)
    return command and f"{command} settle=true"
