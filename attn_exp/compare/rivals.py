"""Rank the backends of a sweep, case by case and pass by pass."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.compare.comparison import Comparison, summarize_sweep
from attn_exp.compare.duel_command import Duel, duels
from attn_exp.compare.join import comparable_groups, latest
from attn_exp.compare.page_parts import case_part, case_values, cell_values, value_columns
from attn_exp.compare.ratio import Ratio, Spreads, gain, ratio
from attn_exp.compare.sheet import Column, Sheet, Tone, interval
from attn_exp.core.case import case_columns
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.flags import flag_marks
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.fields import fields, getter, sortable
from attn_exp.results.read import Sweep
from attn_exp.results.result import Result


@dataclass(frozen=True, slots=True)
class Ranking:
    """One cell among the backends of its case and pass.

    `gain` is how many times better it is than the baseline, or without a baseline than the best (so at most 1). It is
    None if the cell or the baseline has no value. `best` marks the best and all that are too close to it to call.
    """

    cell: Cell
    group: int
    gain: Ratio | None
    best: bool


@dataclass(frozen=True, slots=True)
class Mean:
    """The geometric mean of one backend's gains in one pass, over the cases of one group (`by=`).

    `least` and `most` are the extremes and not an uncertainty: the cases are a choice, not a sample. `best` counts the
    cases in which the backend is best or too close to the best to call. `left_out` counts cases without a gain by
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
    every = [
        _mean(where, direction, label, list(cases.values()), baseline)
        for (where, direction), cases in groups.items()
        for label in labels
        if any(label in case for case in cases.values())
    ]
    every.sort(key=lambda mean: (*map(sortable, mean.group), mean.direction != "forward", -_of(mean)))
    return tuple(every)


def geometric_mean(logs: Sequence[float]) -> float:
    """Return the geometric mean of values whose logarithms are given."""
    return math.exp(math.fsum(logs) / len(logs))


def _mean(
    where: tuple[Any, ...], direction: str, label: str, cases: "Sequence[dict[str, Ranking]]", baseline: str | None
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


def _why(row: "Ranking | None", base: "Ranking | None", baseline: str | None) -> str:
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


# The axis of ranges is the first of these that varies.
_AXES = ("seq_len", "q_len", "kv_len", "batch")


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


def _size(row: "Ranking", name: str) -> Any:
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


# Properties in which rows of one sweep may differ, which separates them into groups.
_UNLIKE: dict[str, Callable[[Result], str]] = {
    "devices": lambda result: result.device_name,
    "power limits": lambda result: str(result.environment.get("power_limit_w")),
    "timers": lambda result: result.measuring.timer,
    "regimes": lambda result: result.measuring.regime,
    "methods": lambda result: result.method_version,
    "states of the L2 cache": lambda result: result.l2,
}

# Those of them that one sweep may vary, under the names that `by=` uses.
_WAYS: dict[str, Callable[[Result], str]] = {
    "device": lambda result: result.device,
    "timer": _UNLIKE["timers"],
    "regime": _UNLIKE["regimes"],
    "l2": lambda result: result.measuring.l2,
}


_STAR = "* best: the fastest, and every row too close to it to call"


@dataclass(frozen=True, kw_only=True, repr=False)
class Rivals(Comparison):
    """A sweep's backends, ranked.

    `rows` are grouped by case and pass, cases in the order of their sizes. `ties` are the two best of each group that
    are too close to call, with the duel that would decide.
    """

    baseline: str | None
    rows: tuple[Ranking, ...]
    means: tuple[Mean, ...]
    by: tuple[str, ...]
    picks: tuple[Pick, ...]
    ties: tuple[Duel, ...]

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
            Column("interval", "95 %", joined=interval("gain_low", "gain_high"), spare=2),
            Column("best", "best"),
            Column("flags", ""),
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
                "*" if row.best else "",
                " ".join(row.cell.result.flags),
                flag_marks(row.cell.result.flags),
                row.cell.result.reason or "",
                row.cell.result.job,
                row.cell.result.sweep,
            )
            for row in self.rows
        ]
        tones: list[Tone] = ["bad" if row.cell.value is None else "best" if row.best else "" for row in self.rows]
        return Sheet("rows", "", columns, tuple(rows), tuple(tones))


def compare_rivals(
    sweeps: Sequence[Sweep],
    cells: Sequence[Cell],
    metric: ChosenMetric,
    spreads: Spreads,
    *,
    baseline: str | None = None,
    by: tuple[str, ...] = (),
    notes: Sequence[str] = (),
) -> Rivals:
    """Rank the backends of one or several sweeps by the selected cells.

    Raises:
        UserError: there is no such baseline.
    """
    labels = sorted({cell.result.label for cell in cells})
    if baseline is not None and not any(_is(label, baseline) for label in labels):
        raise UserError(
            f"there is no baseline={baseline}: {nearest(baseline, labels)}the backends are {', '.join(labels)}"
        )
    cells, repeated = latest(cells)
    groups = comparable_groups(cells)
    # Means are not taken over groups that are not comparable.
    ways = {name: {get(cell.result) for cell in cells} for name, get in _WAYS.items() if name not in by}
    by = (*by, *(name for name, seen in ways.items() if len(seen) > 1))
    rows = [row for index, group in enumerate(groups) for row in _rankings(group, index, metric, spreads, baseline)]
    return Rivals(
        metric=metric,
        sweeps=tuple(summarize_sweep(sweep) for sweep in sweeps),
        broken=tuple(sentence for sweep in sweeps for sentence in sweep.broken),
        notes=(*([_STAR] if any(row.best for row in rows) else ()), *notes, *repeated, *_mixed(groups)),
        baseline=baseline,
        rows=tuple(rows),
        means=means(rows, labels, by, baseline),
        by=by,
        picks=picks(rows, metric),
        ties=_ties(rows, metric),
    )


def _is(label: str, baseline: str) -> bool:
    """Return whether a label is the baseline's; the provider in `auto (cudnn)` need not be typed."""
    return label == baseline or label.startswith(f"{baseline} (")


def _rankings(
    group: Sequence[Cell], index: int, metric: ChosenMetric, spreads: Spreads, baseline: str | None
) -> list[Ranking]:
    valued = [cell for cell in group if cell.value is not None]
    best = min(valued, key=lambda cell: _rank(cell, metric), default=None)
    base = next((cell for cell in valued if _is(cell.result.label, baseline)), None) if baseline else best
    rows = []
    for cell in group:
        over = _gain(cell, base, metric, spreads)
        to_best = over if base is best else _gain(cell, best, metric, spreads)
        rows.append(Ranking(cell, index, over, cell is best or (to_best is not None and not to_best.significant)))
    return rows


def _gain(cell: Cell, over: Cell | None, metric: ChosenMetric, spreads: Spreads) -> Ratio | None:
    if over is None or cell.value is None:
        return None
    if cell is over:
        return Ratio(1.0, 1.0, 1.0, 0.0)
    return ratio(cell, over, metric, spreads.between_rows(cell.result, over.result))


def _rank(cell: Cell, metric: ChosenMetric) -> float:
    assert cell.value is not None
    return -cell.value if metric.kind.higher_is_better else cell.value


def _ties(rows: Sequence[Ranking], metric: ChosenMetric) -> tuple[Duel, ...]:
    tied: dict[int, list[Ranking]] = defaultdict(list)
    for row in rows:
        if row.best:
            tied[row.group].append(row)
    pairs = []
    for group in tied.values():
        if len(group) > 1:
            cells = sorted((row.cell for row in group), key=lambda cell: _rank(cell, metric))[:2]
            # The same order for both passes, so that one command serves both.
            first, second = sorted(cells, key=lambda cell: (cell.result.label, cell.result.job))
            pairs.append((first, second))
    return duels(pairs)


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
