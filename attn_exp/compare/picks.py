"""Picks: which backend to take for which shapes, in a few lines."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.case import case_columns
from attn_exp.compare.cell import Metric
from attn_exp.compare.means import geometric_mean
from attn_exp.compare.ratio import gain
from attn_exp.compare.standing import Standing

# What a range runs along: the first of these that varies.
_AXES = ("seq_len", "q_len", "kv_len", "batch")


@dataclass(frozen=True, slots=True)
class Pick:
    """The backend to take in one pass for a range of shapes.

    `shape` are the case's fields that vary beside the axis, and what it was measured on if that varies; `axis` is the
    size that the range `low` to `high` is of (None if no size varies). `ties` are others that cannot be told from it
    anywhere in the range. `ahead` is how many times better it is than the best of those that can be told from it
    (geometric mean), None where there is no other. `n` is the number of cases.
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


def picks(rows: Sequence[Standing], metric: Metric) -> tuple[Pick, ...]:
    """The backend to take for each range of neighbouring sizes in which one and the same is among the best."""
    varying = _varying(rows)
    axis = next((name for name in _AXES if name in varying), None)
    others = [name for name in varying if name != axis]
    lines: dict[Any, dict[int, list[Standing]]] = defaultdict(lambda: defaultdict(list))
    places = _places(rows)
    for row in rows:
        shape = (*((name, _size(row, name)) for name in others), *places[row.group])
        lines[row.cell.direction, shape][row.group].append(row)
    found = []
    for (direction, shape), groups in lines.items():
        cases = [group for group in groups.values() if any(row.best for row in group)]
        cases.sort(key=lambda group: _size(group[0], axis) if axis else 0)
        for run in _ranges(cases):
            found.append(_pick(direction, shape, axis, run, metric))
    return tuple(found)


def _places(rows: Sequence[Standing]) -> dict[int, tuple[tuple[str, Any], ...]]:
    """Of each group on what and how it was measured, as far as that is not the same everywhere."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        result = row.cell.result
        if result.status == "ok" or row.group not in found:
            found[row.group] = {
                "device": result.device_name,
                "power limit": result.environment.get("power_limit_w"),
                "timer": result.measuring.timer,
                "regime": result.measuring.regime,
                "l2": result.measuring.l2,
            }
    names = [name for name in next(iter(found.values()), {}) if len({place[name] for place in found.values()}) > 1]
    return {group: tuple((name, place[name]) for name in names) for group, place in found.items()}


def _varying(rows: Sequence[Standing]) -> list[str]:
    """The fields of the cases that are not the same everywhere; both lengths as one where they go together."""
    cases = list(dict.fromkeys(row.cell.result.case for row in rows))
    names = [name for name in case_columns() if len({repr(getattr(case, name)) for case in cases}) > 1]
    if all(case.square for case in cases) and {"q_len", "kv_len"} <= set(names):
        names = ["seq_len" if name == "q_len" else name for name in names if name != "kv_len"]
    if all(case.head_dim == case.value_dim for case in cases):
        names = [name for name in names if name != "value_dim"]
    if all(case.q_heads == case.kv_heads for case in cases):
        names = [name for name in names if name != "kv_heads"]
    return names


def _size(row: "Standing", name: str) -> Any:
    return getattr(row.cell.result.case, "q_len" if name == "seq_len" else name)


def _ranges(cases: "Sequence[list[Standing]]") -> "list[list[list[Standing]]]":
    """Neighbouring cases together, as long as some backend is among the best of all of them."""
    runs: list[list[list[Standing]]] = []
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
    direction: str, shape: tuple[tuple[str, Any], ...], axis: str | None, run: "list[list[Standing]]", metric: Metric
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


def _leader(best: "dict[str, Standing]") -> Any:
    return max(best.values(), key=lambda row: row.gain.value if row.gain else 0.0).cell
