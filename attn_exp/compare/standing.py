"""Where each row of a sweep stands: its speed-up over the sweep's baseline, its rank within the case, and their means.

Trackers store these beside each job's own numbers, because those of different cases cannot be sorted together.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.compare.choosing import case_of
from attn_exp.compare.ranking import Ranking, by_group, challengers, is_label, outcome, rank
from attn_exp.compare.ratio import gain, geometric_mean
from attn_exp.compare.rivals import Rivals
from attn_exp.core.case import PASSES
from attn_exp.tracking.base import LIST_PLACE


@dataclass(frozen=True, slots=True)
class Standing:
    """One backend in one pass, over all cases.

    `speedup` is the geometric mean of how many times as fast as the baseline it is, in the `n` of all `cases` where
    both rows decide something; None without such a case. In `best` of all cases it is surely the fastest.
    """

    label: str
    direction: str
    speedup: float | None
    n: int
    best: int
    cases: int


@dataclass(frozen=True)
class Standings:
    """Where the jobs and backends of a sweep stand.

    Attributes:
        baseline: the backend over which speed-ups are.
        of_jobs: each job's metrics: `forward/speedup`, `forward/rank`, `list_place`.
        backends: each backend in each pass, over all cases.
        said: the standing of each job in words, by pass.
        undecided: why a job has no rank, by pass.
    """

    baseline: str
    of_jobs: Mapping[str, Mapping[str, float]]
    backends: tuple[Standing, ...]
    said: Mapping[str, Mapping[str, str]]
    undecided: Mapping[str, Mapping[str, str]]


def standings(rivals: Rivals) -> Standings:
    """Return where the rows of a sweep stand, relative to the baseline of `_baseline`."""
    baseline = _baseline(rivals.rows)
    of_jobs: dict[str, dict[str, float]] = defaultdict(dict)
    said: dict[str, dict[str, str]] = defaultdict(dict)
    undecided: dict[str, dict[str, str]] = defaultdict(dict)
    logs: dict[tuple[str, str], list[float]] = defaultdict(list)
    best: dict[tuple[str, str], int] = defaultdict(int)
    cases: dict[str, int] = defaultdict(int)
    for group in by_group(rivals.rows):
        if len({row.cell.result.label for row in group if row.cell.value is not None}) < 2:
            continue
        base = next((row for row in group if is_label(row.cell.result.label, baseline)), None)
        cases[group[0].cell.direction] += 1
        found = outcome(group)
        for row in group:
            label, side = row.cell.result.label, row.cell.direction
            own = of_jobs[row.cell.result.job]
            best[label, side] += row.best and found == "sure"
            why = _no_rank(row, group)
            place = None if why else _rank(row, group, rivals)
            if place is not None:
                own[f"{side}/rank"] = place
            else:
                undecided[row.cell.result.job][side] = why
            log = gain(row.cell, base.cell, rivals.metric) if base is not None else None
            said[row.cell.result.job][side] = _said(row, group, place, why, log, baseline)
            if log is None:
                continue
            own[f"{side}/speedup"] = math.exp(log)
            if not row.doubt and base is not None and not base.doubt:
                logs[label, side].append(log)
    backends = [
        Standing(
            label, side, geometric_mean(known) if (known := logs[label, side]) else None, len(known), count, cases[side]
        )
        for (label, side), count in best.items()
    ]
    for place, job in enumerate(_listed(rivals.rows), 1):
        of_jobs[job][LIST_PLACE] = float(place)
    with_metrics = {job: own for job, own in of_jobs.items() if own}
    return Standings(baseline, with_metrics, tuple(_ordered(backends)), said, undecided)


def _baseline(rows: Sequence[Ranking]) -> str:
    """Return the backend that has a value in most cases and passes; of several the one that was measured first.

    Over one that cannot compute half of the cases, the others would have no speed-up there.
    """
    # Which backend ran in place of a dispatching one may differ from case to case.
    valued = Counter(_backend(row) for row in rows if row.cell.value is not None)
    order = sorted(rows, key=lambda row: (row.cell.result.started_at, row.cell.result.label))
    return max(dict.fromkeys(map(_backend, order)), key=lambda name: valued[name])


def _backend(row: Ranking) -> str:
    return row.cell.result.label.partition(" (")[0]


def _listed(rows: Sequence[Ranking]) -> list[str]:
    """Return the jobs in the order of a list: by case, of a case the fastest first, by the first pass of the sweep."""
    cases: dict[Any, int] = {}
    times: dict[str, tuple[int, int, float]] = {}
    for row in rows:
        case = cases.setdefault(case_of(row), len(cases))
        value = math.inf if row.cell.value is None else row.cell.value
        own = (case, PASSES.index(row.cell.direction), value)
        times[row.cell.result.job] = min(own, times.get(row.cell.result.job, own))
    return sorted(times, key=lambda job: times[job])


def _said(
    row: Ranking, group: Sequence[Ranking], place: float | None, why: str, log: float | None, baseline: str
) -> str:
    of = sum(other.cell.value is not None for other in group)
    place_said = f"rank {place:.0f} of {of} on this case" if place is not None else f"no rank ({why})"
    times = "" if log is None or is_label(row.cell.result.label, baseline) else f"{math.exp(log):.2f} times as fast as"
    return ", ".join(filter(None, [place_said, times and f"{times} {baseline}"]))


def _no_rank(row: Ranking, group: Sequence[Ranking]) -> str:
    """Return why a row has no rank: it has no value, or is in doubt, or another that is may be the best; else empty."""
    if row.cell.value is None:
        status = row.cell.result.status
        return "no value" if status == "ok" else status
    if row.best:
        return ""
    if row.doubt or outcome(group) != "open":
        return row.doubt
    return f"{', '.join(f'{one.cell.result.label} ({one.doubt})' for one in challengers(group))} may be the best"


def _rank(row: Ranking, group: Sequence[Ranking], rivals: Rivals) -> float:
    """Return how many are better, and one: 1 for the best and all too close to it.

    Backends that ran one kernel have one rank.
    """
    if row.best:
        return 1.0
    own = min(
        rank(other.cell, rivals.metric)
        for other in group
        if other is row or (other.cell.result.label in row.same and other.cell.value is not None and not other.doubt)
    )
    better = [
        other
        for other in group
        if other.cell.value is not None
        and not other.doubt
        and (other.best or rank(other.cell, rivals.metric) < own)
        and other.cell.result.label not in row.same
    ]
    return 1.0 + len(better)


def _ordered(backends: Sequence[Standing]) -> list[Standing]:
    """Return forward passes before backward ones, the fastest first; means over fewer cases stand below the others."""
    return sorted(
        backends,
        key=lambda one: (one.direction != "forward", one.direction, -one.n, -(one.speedup or 0.0), one.label),
    )
