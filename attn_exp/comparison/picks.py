"""Picks: the dispatch table of sweeps, a bucket for each measured shape with the fastest backend that a model can call.

The ranking is that of every comparison; see ranking.py. The time of training is the sum of forward and backward if no
`step` was measured.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from attn_exp.comparison.answer import chosen, homes, labelled, results_of, spreads_for
from attn_exp.comparison.fastest import winners_of
from attn_exp.comparison.ranking import Ranking, by_group, is_tie
from attn_exp.comparison.ratio import Spreads
from attn_exp.comparison.rivals import compare_rivals
from attn_exp.comparison.settled import Settlements
from attn_exp.core.case.case import Case
from attn_exp.core.catalogue import about_backend, backend_options
from attn_exp.core.dispatch_table import MODES, Bucket, DispatchTable, Margin, Mode, facts_of, inexpressible, normalised
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.files import read_whole
from attn_exp.results.cell import Cell, ChosenMetric, cells_of
from attn_exp.results.read import Sweep
from attn_exp.results.result import Result

# Of a call on the device, and with the host's launches.
_TIMERS = ("device", "event")


@dataclass(frozen=True)
class Picked:
    """A table, and the notes on what is not in it."""

    table: DispatchTable
    notes: tuple[str, ...] = ()


def pick(
    sweeps: Sequence[Sweep],
    *,
    backends: Sequence[str] = (),
    where: str | None = None,
    made_by: str = "",
    every: bool = False,
) -> Picked:
    """Return the dispatch table of sweeps, which were read from folders.

    Only the named `backends` may be picked; without names all that a model can call through SDPA, or with `every` all
    there are. With `every` cases are as they were measured, those that no call of SDPA has among them. Raises UserError
    if nothing can be picked, or records are of several environments.
    """
    left_out = Counter[str]()
    may = [tuple(row for row in sweep.results if _may(row, backends, left_out, every=every)) for sweep in sweeps]
    together = labelled([replace(sweep, results=kept) for sweep, kept in zip(sweeps, may, strict=True)])
    results = results_of(together)
    if where and results:
        cells = chosen(cells_of(results, ChosenMetric()), where)
        results = list({id(cell.result): cell.result for cell in cells}.values())
    notes = [f"{count} records are not in the table: {why}" for why, count in left_out.most_common()]
    names = sorted({str(result.backend["name"]) for result in results_of(sweeps)})
    for name in backends:
        if name not in names:
            raise UserError(f"no record is of {name}: {nearest(name, names)}the backends are {', '.join(names)}")
    if not results:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise UserError(f"{', '.join(sweep.name for sweep in together)} has nothing to pick from{why}")
    measured = [result for result in results if result.status == "ok"]
    if not measured:
        raise UserError(f"{', '.join(sweep.name for sweep in together)} has no record that is ok: see its table.txt")
    fingerprint = _fingerprint(measured)
    spreads = spreads_for(results, None)
    metric = {mode: ChosenMetric("time_us", direction) for mode, direction in MODES.items()}
    settlements = Settlements(homes(together))
    buckets: list[Bucket] = []
    for mode, direction in MODES.items():
        cells = list(_inference(results) if mode == "inference" else _training(results))
        if not any(cell.value for cell in cells):
            notes.append(f"nothing was measured for {mode}: its {direction} has no record that is ok")
            continue
        rivals = compare_rivals(together, cells, metric[mode], spreads, duels_of=lambda: settlements)
        per_case = [_bucket(mode, group, metric[mode], spreads) for group in by_group(rivals.rows)]
        measured_here = [bucket for bucket in per_case if bucket is not None]
        if lacking := len(per_case) - len(measured_here):
            notes.append(f"{lacking} of {len(per_case)} cases were not measured well enough for {mode}")
        if not every:
            measured_here = _once(replace(bucket, case=normalised(bucket.case)) for bucket in measured_here)
        buckets += measured_here
    if not buckets:
        raise UserError(f"there is nothing to pick from: {'; '.join(notes)}")
    used = {label for bucket in buckets for label in bucket.times_us}
    behind = [result for result in measured if result.label in used]
    table = DispatchTable(
        made_by=made_by,
        fingerprint=fingerprint,
        backends={row.label: {key: value for key, value in row.backend.items() if key != "about"} for row in behind},
        buckets=tuple(buckets),
    )
    return Picked(table, tuple(notes))


def _may(result: Result, backends: Sequence[str], left_out: Counter[str], *, every: bool) -> bool:
    """Return whether a model, or with `every` any program, could call what was measured; `left_out` counts why not."""
    name, target = str(result.backend["name"]), str(result.backend.get("_target_"))
    reason = inexpressible(result.case)
    always = (
        (bool(backends) and name not in backends, ""),
        (result.measuring.inputs != "normal", f"inputs={result.measuring.inputs}"),
    )
    of_models = (
        (reason is not None, f"{reason}, which no call of SDPA has"),
        (target not in backend_options(), "their backend does not come with attn_exp"),
        (not result.about.function, "their backend is no function of q, k and v"),
        (result.compile.mode != "none", "compiled by themselves: a model is compiled as a whole"),
        (bool(result.backend.get("deterministic")), "deterministic=true, which PyTorch has a switch for"),
    )
    for applies, why in always if every else (*always, *of_models):
        if applies:
            if why:
                left_out[why] += 1
            return False
    return True


def _inference(results: Sequence[Result]) -> Iterator[Cell]:
    """Return the forward cells: of a case that was measured without gradients, only those."""
    forward = cells_of(results, ChosenMetric("time_us", "forward"))
    without = {cell.result.case for cell in forward if not cell.result.measuring.with_gradients}
    for cell in forward:
        if not cell.result.measuring.with_gradients or cell.result.case not in without:
            yield cell


def _training(results: Sequence[Result]) -> Iterator[Cell]:
    """Return a `step` cell for each result: as it was measured, or the sum of forward and backward."""
    steps = {id(cell.result): cell for cell in cells_of(results, ChosenMetric("time_us", "step"))}
    for result in results:
        sides = result.measuring.passes
        if "step" in sides:
            yield steps[id(result)]
        elif {"forward", "backward"} <= set(sides):
            yield _sum(result, cells_of([result], ChosenMetric("time_us")))


def _sum(result: Result, halves: Sequence[Cell]) -> Cell:
    values = [cell.value for cell in halves if cell.value is not None]
    if len(values) < len(halves):
        return Cell(result, "step", None, None)
    total = math.fsum(values)
    present = [cell.half for cell in halves if cell.half is not None]
    half = (
        math.hypot(*(value / total * half for value, half in zip(values, present, strict=True)))
        if len(present) == len(halves)
        else None
    )
    rounds = [cell.rounds for cell in halves if cell.rounds is not None]
    return Cell(result, "step", total, half, min(rounds, default=None))


def _bucket(mode: Mode, group: Sequence[Ranking], metric: ChosenMetric, spreads: Spreads) -> Bucket | None:
    """Return the bucket of the rows of one case, a tie for the least upper bound; None without a sound answer."""
    valued = [row for row in group if row.cell.compared]
    if not valued or any(row.may_win for row in group):
        return None
    cases = winners_of(group, metric, spreads)
    won = cases[0].rows if cases else tuple(valued)
    tied = is_tie(won)
    best = min(won, key=lambda row: (row.cell.value or 0.0) * math.exp(row.cell.half or 0.0)) if tied else won[0]
    lead = cases[0].lead if cases else None
    return Bucket(
        mode=mode,
        case=best.cell.result.case,
        pick=best.label,
        undecided=tuple(sorted(row.label for row in won)) if tied else (),
        margin=None if lead is None else Margin(over=lead.over, times=lead.value, low=lead.low, high=lead.high),
        times_us={row.label: float(row.cell.value or 0.0) for row in valued},
        halves={row.label: row.cell.half for row in valued if row.cell.half is not None},
        timers_us={timer: times for timer in _TIMERS if (times := _times_by(timer, valued))},
        records={row.cell.result.job: _hash(row.cell.result) for row in valued},
    )


def _times_by(timer: str, rows: Iterable[Ranking]) -> dict[str, float]:
    """Return the times of a timer that ran, as the one that ranks or beside it, by label."""
    times: dict[str, float] = {}
    for row in rows:
        result, metric = row.cell.result, f"{row.cell.direction}/{timer}_time_us"
        us = row.cell.value if result.measuring.timer == timer else result.metrics.get(metric)
        times |= {} if us is None else {row.label: us}
    return times


def _once(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return the buckets, of two that are one call of SDPA (alignments of a dense case) the one with more backends."""
    fullest: dict[Case, Bucket] = {}
    for bucket in buckets:
        kept = fullest.get(bucket.case)
        if kept is None or len(bucket.times_us) > len(kept.times_us):
            fullest[bucket.case] = bucket
    return list(fullest.values())


def _hash(result: Result) -> str:
    try:
        return hashlib.sha256(read_whole(result.path)).hexdigest()
    except OSError as error:
        raise UserError(f"{result.path} cannot be read any more ({error.strerror}): give the sweep's folder") from error


def _fingerprint(results: Sequence[Result]) -> dict[str, str]:
    """Return what the times depend on; raises UserError if the records are of several environments."""
    every: dict[str, dict[str, None]] = defaultdict(dict)
    packages = {package for result in results for package in about_backend(str(result.backend["name"])).packages}
    for result in results:
        for name, value in facts_of(result.device, result.environment, packages).items():
            every[name][value] = None
    for name, values in every.items():
        if len(values) > 1:
            raise UserError(
                f"the records are of several environments ({name} {', '.join(values)}), and a table is for one: "
                "give sweeps of one, or choose with where="
            )
    return {name: next(iter(values)) for name, values in every.items()}
