"""Means: the geometric mean of a backend's gains over the baseline, with what it is a mean of and what was left out."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.compare.fields import fields, getter, sortable
from attn_exp.compare.standing import Standing


@dataclass(frozen=True, slots=True)
class Mean:
    """The geometric mean of one backend's gains in one pass, over the cases of one group (`by=`).

    `least` and `most` are the extremes, not an uncertainty: the cases are what was chosen, not a sample of anything.
    `best` counts the cases in which the backend is best or not told from the best. `left_out` counts the cases without
    a gain by their reason; `n` and those together are all cases of the group.
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


def means(rows: Sequence[Standing], labels: Sequence[str], by: Sequence[str], baseline: str | None) -> tuple[Mean, ...]:
    """The means over all cases, or over those of each combination of the fields in `by`.

    Raises:
        UserError: `by` names what is not there.
    """
    cells = [row.cell for row in rows]
    known = fields(cells) if by else {}
    getters = [getter(name, known, "by=") for name in by]
    # A group of cells has one case: what `by` names is that of its first cell, unless it is the backend's own.
    groups: dict[tuple[tuple[Any, ...], str], dict[int, dict[str, Standing]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        where = tuple(get(row.cell) for get in getters)
        groups[where, row.cell.direction][row.group].setdefault(row.cell.result.label, row)
    found = [
        _mean(where, direction, label, list(cases.values()), baseline)
        for (where, direction), cases in groups.items()
        for label in labels
        if any(label in case for case in cases.values())
    ]
    return tuple(sorted(found, key=lambda mean: (*map(sortable, mean.group), mean.direction != "forward", -_of(mean))))


def geometric_mean(logs: Sequence[float]) -> float:
    """The geometric mean of values of which the logarithms are given."""
    return math.exp(math.fsum(logs) / len(logs))


def _mean(
    where: tuple[Any, ...], direction: str, label: str, cases: "Sequence[dict[str, Standing]]", baseline: str | None
) -> Mean:
    logs, left_out, best = [], Counter[str](), 0
    for case in cases:
        row = case.get(label)
        if row is not None and row.gain is not None:
            logs.append(math.log(row.gain.value))
            best += row.best
        else:
            left_out[_why(row, case.get(baseline) if baseline else None, baseline)] += 1
    value = geometric_mean(logs) if logs else None
    least, most = (math.exp(min(logs)), math.exp(max(logs))) if logs else (None, None)
    return Mean(where, direction, label, value, least, most, len(logs), best, tuple(sorted(left_out.items())))


def _why(row: "Standing | None", base: "Standing | None", baseline: str | None) -> str:
    if row is None:
        return "not measured"
    if row.cell.value is None:
        return row.cell.result.status if row.cell.result.status != "ok" else "without this metric"
    if baseline is None:
        return "the best is 0"
    if base is None:
        return f"{baseline} not measured"
    if base.cell.result.status == "ok":
        return f"{baseline} is 0" if base.cell.value == 0 else f"{baseline} without this metric"
    return f"{baseline} {base.cell.result.status}"


def _of(mean: Mean) -> float:
    return mean.value or 0.0
