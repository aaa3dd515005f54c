"""Which backend to choose for which sizes, from a sweep's rows."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.compare.ranking import Ranking
from attn_exp.compare.ratio import gain
from attn_exp.core.case import case_columns
from attn_exp.results.cell import ChosenMetric

# The axis of ranges is the first of these that varies.
_AXES = ("seq_len", "q_len", "kv_len", "batch")


def geometric_mean(logs: Sequence[float]) -> float:
    """Return the geometric mean of values whose logarithms are given."""
    return math.exp(math.fsum(logs) / len(logs))


@dataclass(frozen=True, slots=True)
class Pick:
    """The backend to choose in one pass for a range of shapes.

    `shape` are the case's fields that vary beside the axis, and the device if that varies. `axis` is the size whose
    range is `low` to `high` (None if no size varies). `ties` are backends too close to call anywhere in the range.
    `ahead` is how many times better the choice is than the best of the others (geometric mean), None without others.
    `n` is the number of cases.
    """

    direction: str
    shape: tuple[tuple[str, Any], ...]
    axis: str | None
    low: Any
    high: Any
    label: str
    ties: tuple[str, ...]
    ahead: float | None
    n: int


def picks(rows: Sequence[Ranking], metric: ChosenMetric) -> tuple[Pick, ...]:
    """Return the backend to choose for each range of adjacent sizes over which one backend stays among the best."""
    varying = _varying(rows)
    axis = next((name for name in _AXES if name in varying), None)
    others = [name for name in varying if name != axis]
    lines: dict[Any, dict[int, list[Ranking]]] = defaultdict(lambda: defaultdict(list))
    places = _places(rows)
    for row in rows:
        shape = (*((name, _size(row, name)) for name in others), *places[row.group])
        lines[row.cell.direction, shape][row.group].append(row)
    chosen = []
    for (direction, shape), groups in lines.items():
        cases = [group for group in groups.values() if any(row.best for row in group)]
        cases.sort(key=lambda group: _size(group[0], axis) if axis else 0)
        for run in _ranges(cases):
            chosen.append(_pick(direction, shape, axis, run, metric))
    return tuple(chosen)


def _places(rows: Sequence[Ranking]) -> dict[int, tuple[tuple[str, Any], ...]]:
    """Return how and on what each group was measured, as far as groups differ in it."""
    places: dict[int, dict[str, Any]] = {}
    for row in rows:
        result = row.cell.result
        if result.status == "ok" or row.group not in places:
            places[row.group] = {
                "device": result.device_name,
                "power limit": result.environment.get("power_limit_w"),
                "timer": result.measuring.timer,
                "regime": result.measuring.regime,
                "l2": result.measuring.l2,
                "inputs": result.measuring.inputs,
            }
    names = [name for name in next(iter(places.values()), {}) if len({place[name] for place in places.values()}) > 1]
    return {group: tuple((name, place[name]) for name in names) for group, place in places.items()}


def _varying(rows: Sequence[Ranking]) -> list[str]:
    """Return the fields in which the cases differ; both lengths as `seq_len` if they are equal."""
    cases = list(dict.fromkeys(row.cell.result.case for row in rows))
    names = [name for name in case_columns() if len({repr(getattr(case, name)) for case in cases}) > 1]
    if all(case.square for case in cases) and {"q_len", "kv_len"} <= set(names):
        names = ["seq_len" if name == "q_len" else name for name in names if name != "kv_len"]
    if all(case.head_dim == case.value_dim for case in cases):
        names = [name for name in names if name != "value_dim"]
    if all(case.q_heads == case.kv_heads for case in cases):
        names = [name for name in names if name != "kv_heads"]
    return names


def _size(row: Ranking, name: str) -> Any:
    return getattr(row.cell.result.case, "q_len" if name == "seq_len" else name)


def _ranges(cases: "Sequence[list[Ranking]]") -> "list[list[list[Ranking]]]":
    """Split adjacent cases into runs over which some backend is among the best of every case."""
    runs: list[list[list[Ranking]]] = []
    common: set[str] = set()
    for case in cases:
        best = {row.cell.result.label for row in case if row.best}
        if runs and common & best:
            common &= best
            runs[-1].append(case)
        else:
            runs.append([case])
            common = best
    return runs


def _pick(
    direction: str,
    shape: tuple[tuple[str, Any], ...],
    axis: str | None,
    run: "list[list[Ranking]]",
    metric: ChosenMetric,
) -> Pick:
    best = [{row.cell.result.label: row for row in case if row.best} for case in run]
    tied = set(best[0]).intersection(*best[1:])

    def value(label: str) -> float:
        return geometric_mean([gain(case[label].cell, _leader(case), metric) or 0.0 for case in map(dict, best)])

    first, *ties = sorted(tied, key=lambda label: (-value(label), label))
    ahead = []
    for case, leading in zip(run, best, strict=True):
        behind = [row.cell for row in case if row.cell.result.label not in tied and row.cell.value is not None]
        logs = [log for cell in behind if (log := gain(leading[first].cell, cell, metric)) is not None]
        ahead += [min(logs)] if logs else []
    ends = [_size(case[0], axis) for case in (run[0], run[-1])] if axis else [None, None]
    return Pick(
        direction, shape, axis, ends[0], ends[1], first, tuple(ties), geometric_mean(ahead) if ahead else None, len(run)
    )


def _leader(best: "dict[str, Ranking]") -> Any:
    return max(best.values(), key=lambda row: row.gain.value if row.gain else 0.0).cell
