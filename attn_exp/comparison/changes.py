"""Changes: compare a sweep with an earlier one, cell by cell, with a verdict on each.

The two sweeps were not measured side by side. A difference counts if it exceeds both cells' intervals, the usual
difference between sessions, and what several old runs of the cell differ by.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from attn_exp.comparison.columns import NAMES, case_pairs, row_sheet
from attn_exp.comparison.comparison import Comparison, case_order
from attn_exp.comparison.environment import differences, incomparable
from attn_exp.comparison.join import Pair, joined, nothing_in_common, run_key
from attn_exp.comparison.ratio import Spreads, gain, uncertainty
from attn_exp.core.errors import UserError
from attn_exp.core.record.flags import flag_marks
from attn_exp.core.sheet.sheet import Column, Pairs, Sheet, Tone, interval
from attn_exp.core.stats.multiple import LEVEL, benjamini_hochberg
from attn_exp.results.baselines import MOST_RUNS
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.read import Sweep

Verdict = Literal["lost", "slower", "faster", "fixed", "undecided", "gone", "new", "failed", "equivalent"]
# In the order of a report.
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# A machine that moves its own times by more than this, as seen, tells nothing; a larger change is one.
_MOST_SCATTER = 0.25
_LARGEST_LOG = 700.0
_TONES: dict[Verdict, Tone] = {"lost": "bad", "slower": "bad", "faster": "good", "fixed": "good", "undecided": "open"}


@dataclass(frozen=True, slots=True)
class Change:
    """One cell in the old and the new sweep; either may lack it.

    `change` is the new value over the old one minus 1. `low` and `high` bound its 95 %
    interval, and `spread` is the part of the interval that is not the cells' own. `p` is two-sided and adjusted for the
    number of cells. All are None unless both sweeps have a value.
    """

    old: Cell | None
    new: Cell | None
    verdict: Verdict
    change: float | None = None
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    p: float | None = None

    @property
    def cell(self) -> Cell:
        """The new cell, or the old one if there is no new one."""
        cell = self.new or self.old
        assert cell is not None
        return cell

    @property
    def other_kernel(self) -> tuple[str, str] | None:
        """The longest kernels of the old and the new cell if they differ."""
        if self.old is None or self.new is None:
            return None
        names = [_kernel(self.old), _kernel(self.new)]
        return (names[0], names[1]) if names[0] and names[1] and names[0] != names[1] else None


def kernel_notes(rows: Sequence[Change]) -> list[str]:
    """Return notes on kernels that were replaced by others, the most frequent first."""
    swaps = Counter(names for row in rows if (names := row.other_kernel) is not None)
    return [
        f"another kernel ran in {count} cells: {_cut(old)} -> {_cut(new)}" for (old, new), count in swaps.most_common(3)
    ]


def _cut(name: str) -> str:
    name = name.split("(")[0]
    return name if len(name) <= 60 else f"{name[:57]}..."


@dataclass(frozen=True, kw_only=True, repr=False)
class Changes(Comparison):
    """A sweep and an earlier one. Verdict `equivalent` rules out a difference of `margin`."""

    rows: tuple[Change, ...]
    margin: float
    old: int

    @property
    def counts(self) -> dict[str, int]:
        """The number of cells with each verdict, without verdicts that no cell has."""
        count = Counter(row.verdict for row in self.rows)
        return {verdict: count[verdict] for verdict in VERDICTS if count[verdict]}

    def regressions(self, threshold: float) -> list[Change]:
        """Return the cells that were lost or are slower by at least `threshold` (0.03 is 3 %)."""
        return [
            row
            for row in self.rows
            if row.verdict == "lost"
            or (row.verdict == "slower" and row.change is not None and _slower(row.change, self.metric) >= threshold)
        ]

    def undecided(self, threshold: float) -> list[Change]:
        """Return the cells that may take `threshold` more time, but not surely."""
        sure = {id(row) for row in self.regressions(threshold)}
        may = [row for row in self.rows if row.verdict in ("undecided", "slower") and id(row) not in sure]
        return [row for row in may if _worst(row, self.metric) >= threshold]

    def sheet(self) -> Sheet:
        """Return a row for each cell: its verdict, both values and the change between them."""
        name, head = self.metric.name, self.metric.kind.head
        pairs: Pairs = (
            (Column("verdict", "verdict"), lambda row: row.verdict),
            *case_pairs(self.rows),
            *NAMES,
            (Column(f"old_{name}", f"old {head}", "figure"), lambda row: row.old.value if row.old else None),
            (Column(f"new_{name}", f"new {head}", "figure"), lambda row: row.new.value if row.new else None),
            (Column("change", "change %", "percent"), lambda row: row.change),
            (Column("change_low", ""), lambda row: row.low),
            (Column("change_high", ""), lambda row: row.high),
            (Column("interval", "95 %", joined=interval("change_low", "change_high", form="percent"), spare=2), None),
            (Column("p_adjusted", ""), lambda row: row.p),
            (Column("spread", ""), lambda row: row.spread),
            (Column("old_status", ""), lambda row: _status(row.old)),
            (Column("new_status", ""), lambda row: _status(row.new)),
            (Column("status", ""), _statuses),
            (Column("old_kernel", ""), lambda row: _kernel(row.old)),
            (Column("new_kernel", ""), lambda row: _kernel(row.new)),
            (Column("flags", ""), lambda row: " ".join(row.cell.flags)),
            (Column("marks", "marks", spare=1), lambda row: flag_marks(row.cell.flags)),
            (Column("job", ""), lambda row: row.cell.result.job),
        )
        return row_sheet(self.rows, pairs, [_TONES.get(row.verdict, "") for row in self.rows])


def _status(cell: Cell | None) -> str:
    return cell.result.status if cell else ""


def _statuses(row: Change) -> str:
    old, new = _status(row.old), _status(row.new)
    return "ok" if old == new == "ok" else f"{old or '-'} -> {new or '-'}"


def _kernel(cell: Cell | None) -> str:
    return cell.result.longest_kernel(cell.direction) if cell else ""


def compare_sweeps(
    old: Sequence[Sweep],
    new: Sequence[Sweep],
    cells_old: Sequence[Cell],
    cells_new: Sequence[Cell],
    metric: ChosenMetric,
    spreads: Spreads,
    *,
    margin: float,
    anyway: bool = False,
    notes: Sequence[str] = (),
) -> Changes:
    """Compare the selected cells of new sweeps with those of old ones.

    Raises UserError if the sweeps have nothing in common, or their environments are incomparable and `anyway` is not
    set.
    """
    pairs = joined(cells_old, cells_new)
    if not any(before and after for before, after in pairs):
        raise UserError(
            f"{_names(new)} and {_names(old)} have nothing in common: {nothing_in_common(cells_old, cells_new)}"
        )
    unequal = differences(
        (before.result, after.result) for before, after in pairs if before and after and before.value and after.value
    )
    unlike = incomparable(unequal, f"{_names(new)} and {_names(old)}", anyway=anyway)
    runs: dict[Any, list[Cell]] = defaultdict(list)
    for cell in sorted(cells_old, key=lambda cell: cell.result.finished_at):
        runs[run_key(cell)].append(cell)
    cells = [_opened(pair, metric, runs[run_key(pair[0])][-MOST_RUNS:] if pair[0] else ()) for pair in pairs]
    scatter = _scatter(cells)
    rows = _judged([_closed(cell, metric, spreads, scatter) for cell in cells], metric, margin)
    rows.sort(key=lambda row: (VERDICTS.index(row.verdict), *case_order(row.cell)))
    return Changes(
        metric=metric,
        sweeps=(*old, *new),
        differences=unequal,
        notes=(
            *notes,
            *(
                f"{count} old runs of {n} cells: compared with their mean; the margin is at least what they "
                "differ by (spread= replaces it)"
                for count, n in Counter(row.runs for row in cells if isinstance(row, _Open) and row.runs > 1).items()
            ),
            *(f"compared nevertheless (anyway=true): {reason}, in {reason.cells} cells" for reason in unlike),
            *kernel_notes(rows),
        ),
        rows=tuple(rows),
        margin=margin,
        old=len(old),
    )


@dataclass(frozen=True, slots=True)
class _Open:
    """The mean of a cell's `runs` old values, how many times better the new one is, and what the old ones explain."""

    old: Cell
    new: Cell
    log: float
    runs: int
    explained: float


def _opened(pair: Pair, metric: ChosenMetric, runs: Sequence[Cell]) -> Change | _Open:
    """Return one cell with its log change, or with its verdict if it lacks a value."""
    old, new = pair
    if old is None or new is None or old.value is None or new.value is None:
        return Change(old, new, _without_two_values(old, new))
    logs, apart = [math.log(run.value) for run in runs if run.value and run.value > 0 and run.compared], 0.0
    if old.value and len(logs) > 1:
        mean = statistics.fmean(logs)
        # A new value may be as far from the nearest old one as the old ones are from each other.
        old, apart = replace(old, value=math.exp(mean)), max(logs) - min(logs) + max(abs(log - mean) for log in logs)
    log = gain(new, old, metric)
    if log is None:
        return Change(old, new, "equivalent" if old.value == new.value else "undecided")
    return _Open(old, new, log, len(logs), apart)


def _closed(cell: Change | _Open, metric: ChosenMetric, spreads: Spreads, scatter: float) -> Change:
    """Return the change of one cell with its interval; its verdict is decided later."""
    if isinstance(cell, Change):
        return cell
    old, new = cell.old.result, cell.new.result
    spread = spreads.between_sessions(old, new) if metric.kind.follows_clock else spreads.between_rows(new, new)
    least = scatter if new.device == "cpu" and metric.kind.follows_clock else 0.0
    spread = spread if spreads.fixed is not None else max(spread, least, math.expm1(min(cell.explained, _LARGEST_LOG)))
    doubt = uncertainty(cell.new, cell.old, spread)
    log = cell.log if metric.kind.higher_is_better else -cell.log
    # The upper bound of two rounds that differ wildly is beyond the largest float.
    bounds = (math.expm1(log), math.expm1(log - doubt.half), math.expm1(min(log + doubt.half, _LARGEST_LOG)))
    return Change(cell.old, cell.new, "undecided", *bounds, spread, doubt.p_value(log))


def _scatter(cells: Sequence[Change | _Open]) -> float:
    """Estimate from a CPU's cells themselves how much equal cells differ between sessions (95 %, robustly).

    Other programs move a CPU's times by more than any known bound, and each cell differently. A shift common to all
    cells counts as well. A change of most cells beyond 25 % is found nevertheless.
    """
    logs = [cell.log for cell in cells if isinstance(cell, _Open) and cell.new.result.device == "cpu"]
    if not logs:
        return 0.0
    # The median of |x| is 0.6745 standard deviations of a normal x.
    share = math.expm1(1.96 / 0.6745 * statistics.median(map(abs, logs)))
    return min(share, _MOST_SCATTER)


def _without_two_values(old: Cell | None, new: Cell | None) -> Verdict:
    had, has = old is not None and old.value is not None, new is not None and new.value is not None
    if old is None:
        return "new" if has else "failed"
    if new is None:
        return "gone" if had else "failed"
    if had:
        # An `ok` record without this metric has not failed, so nothing was lost.
        return "lost" if new.result.status != "ok" else "undecided"
    return "fixed" if has else "failed"


def _judged(rows: Sequence[Change], metric: ChosenMetric, margin: float) -> list[Change]:
    """Return the rows with verdicts; at most 5 % of the `faster` and `slower` ones are expected to be false."""
    adjusted = iter(benjamini_hochberg([row.p for row in rows if row.p is not None]))
    judged = []
    for row in rows:
        if row.p is None or row.change is None or row.low is None or row.high is None:
            judged.append(row)
            continue
        p = next(adjusted)
        better = (row.change > 0) == metric.kind.higher_is_better
        verdict: Verdict = "undecided"
        if p <= LEVEL and (row.low > 0 or row.high < 0):
            verdict = "faster" if better else "slower"
        elif row.low > -1 and max(abs(math.log1p(row.low)), abs(math.log1p(row.high))) <= math.log1p(margin):
            verdict = "equivalent"
        judged.append(replace(row, verdict=verdict, p=p))
    return judged


def _worst(row: Change, metric: ChosenMetric) -> float:
    """Return the upper bound of the new cell's additional time; infinite without an interval."""
    bound = row.low if metric.kind.higher_is_better else row.high
    return math.inf if bound is None else _slower(bound, metric)


def _slower(change: float, metric: ChosenMetric) -> float:
    """Return the new cell's additional time as a share of the old one, also if the metric is a rate."""
    if not metric.kind.higher_is_better:
        return change
    return 1 / (1 + change) - 1 if change > -1 else math.inf


def _names(sweeps: Sequence[Sweep]) -> str:
    return ",".join(sweep.name for sweep in sweeps)
