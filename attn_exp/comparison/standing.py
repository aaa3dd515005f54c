"""Standings of a sweep's rows: speed-up over the sweep's baseline, rank within the case, and their means.

Trackers store these beside each job's own numbers, because those of different cases cannot be sorted together.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.comparison.join import case_of
from attn_exp.comparison.ranking import Ranking, by_group, is_label, is_tie, winners
from attn_exp.comparison.ratio import gain, geometric_mean
from attn_exp.comparison.rivals import Rivals
from attn_exp.core.case.case import PASSES
from attn_exp.tracking.base import LIST_PLACE


@dataclass(frozen=True, slots=True)
class Standing:
    """One backend in one pass, over all cases.

    `speedup` is the geometric mean of how many times as fast as the baseline it is, in the `n` of all `cases` where
    both have a value; None without such a case. It wins `best` of all cases, without a tie.
    """

    label: str
    direction: str
    speedup: float | None
    n: int
    best: int
    cases: int


@dataclass(frozen=True)
class Standings:
    """The standings of the jobs and backends of a sweep.

    Attributes:
        baseline: the backend over which speed-ups are.
        of_jobs: each job's metrics: `forward/speedup`, `forward/rank`, `list_place`.
        backends: each backend in each pass, over all cases.
        said: the standing of each job in words, by pass.
    """

    baseline: str
    of_jobs: Mapping[str, Mapping[str, float]]
    backends: tuple[Standing, ...]
    said: Mapping[str, Mapping[str, str]]


def standings(rivals: Rivals) -> Standings:
    """Return where the rows of a sweep stand, relative to the baseline of `_baseline`."""
    baseline = _baseline(rivals.rows)
    of_jobs: dict[str, dict[str, float]] = defaultdict(dict)
    said: dict[str, dict[str, str]] = defaultdict(dict)
    logs: dict[tuple[str, str], list[float]] = defaultdict(list)
    best: dict[tuple[str, str], int] = defaultdict(int)
    cases: dict[str, int] = defaultdict(int)
    for group in by_group(rivals.rows):
        if not (won := winners(group)):
            continue
        base = next((row for row in group if is_label(row.label, baseline)), None)
        cases[group[0].cell.direction] += 1
        sole = set() if is_tie(won) else {row.label for row in won}
        for row in group:
            label, side, own = row.label, row.cell.direction, of_jobs[row.cell.result.job]
            best[label, side] += label in sole
            if (place := _rank(row, group)) is not None:
                own[f"{side}/rank"] = place
            log = gain(row.cell, base.cell, rivals.metric) if base is not None else None
            said[row.cell.result.job][side] = _said(row, group, place, log, baseline)
            if log is not None:
                own[f"{side}/speedup"] = math.exp(log)
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
    # Forward before backward, the fastest first; means over fewer cases stand below the others.
    backends.sort(key=lambda one: (one.direction != "forward", one.direction, -one.n, -(one.speedup or 0.0), one.label))
    return Standings(baseline, with_metrics, tuple(backends), said)


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
        case = cases.setdefault(case_of(row.cell), len(cases))
        value = math.inf if row.cell.value is None else row.cell.value
        own = (case, PASSES.index(row.cell.direction), value)
        times[row.cell.result.job] = min(own, times.get(row.cell.result.job, own))
    return sorted(times, key=lambda job: times[job])


def _said(row: Ranking, group: Sequence[Ranking], place: float | None, log: float | None, baseline: str) -> str:
    if place is None:
        return "no value" if row.cell.result.status == "ok" else row.cell.result.status
    of = sum(other.cell.value is not None for other in group)
    tied = place == 1 and is_tie([other for other in group if other.best])
    place_said = f"rank {place:.0f} of {of} on this case" + (", too close to call" if tied else "")
    if log is None or is_label(row.label, baseline):
        return place_said
    return f"{place_said}, {math.exp(log):.2f} times as fast as {baseline}"


def _rank(row: Ranking, group: Sequence[Ranking]) -> float | None:
    """Return how many are better, and one: 1 for the best and all too close to it; None without a sound value.

    Backends that ran one kernel have one rank.
    """
    if not row.cell.compared:
        return None
    if row.best:
        return 1.0
    return 1.0 + sum(other.best or other.place < row.place for other in group if other.cell.compared)
