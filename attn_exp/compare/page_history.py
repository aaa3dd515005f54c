"""The page of a history: a row a cell, a column a sweep in files, a curve in tables."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from attn_exp.compare.history import History, Trend
from attn_exp.compare.page_parts import about_part, case_part, case_values, day, head_lines, shared_line
from attn_exp.compare.sheet import Column, Page, Sheet, Tone, written

_LEVELS = "▁▂▃▄▅▆▇█"
# The curve's full height is this much, or the series' own range if that is more.
_FULL_HEIGHT = 0.05


def history_page(found: History) -> Page:
    """Trends, those whose level changed first; what changed in the environment beside each change of level."""
    shared, case = case_part([row.cell for row in found.rows])
    names = [one.name for one in found.sweeps]
    columns = (
        *case,
        Column("pass", "pass"),
        Column("backend", "backend"),
        Column("n", "n"),
        Column(f"first_{found.metric.name}", f"first {found.metric.head}", "figure"),
        Column(f"last_{found.metric.name}", f"last {found.metric.head}", "figure"),
        Column("change", "change %", "percent"),
        Column("per_sweep", "a sweep %", "percent", spare=2),
        Column("scatter", "+-%", "half", spare=1),
        Column("curve", "trend", joined=_curve([f"at_{name}" for name in names])),
        *(Column(f"at_{name}", "") for name in names),
        Column("level_changed", "level changed"),
        Column("coincides", ""),
        Column("last_status", "status" if any(row.lost for row in found.rows) else ""),
    )
    rows = tuple(_row(row, names) for row in found.rows)
    tones = tuple(_tone(row, more_is_better=found.metric.more_is_better) for row in found.rows)
    notes = [_turn_note(row, names) for row in found.rows if row.turns] + list(found.notes)
    about = about_part(found) | {"kind": "history", "shared": shared}
    lines = head_lines(found)
    if len(lines) > 4:
        span = f"{day(found.sweeps[0].ended_at)} to {day(found.sweeps[-1].ended_at)}"
        devices = ", ".join(sorted({device for one in found.sweeps for device in one.devices}))
        lines = [f"{len(names)} sweeps, {names[0]} to {names[-1]}, {span}, {devices}"]
    turned = sum(bool(row.turns) for row in found.rows)
    lines += [shared_line(shared), f"of {len(found.rows)} cells: {turned} changed their level"]
    return Page(about, tuple(lines), (Sheet("rows", "", columns, rows, tones),), tuple(notes))


def _row(row: Trend, names: Sequence[str]) -> tuple[object, ...]:
    valued = [cell for cell in row.cells if cell is not None and cell.value is not None]
    last = row.cells[-1]
    return (
        *case_values(row.cell),
        row.cell.direction,
        row.cell.result.label,
        row.n,
        valued[0].value,
        valued[-1].value,
        row.change,
        row.per_sweep,
        row.scatter,
        None,
        *row.relative,
        ", ".join(f"{written(turn.change, 'percent')} % at {names[turn.at]}" for turn in row.turns),
        "; ".join(str(one) for turn in row.turns for one in turn.coincides),
        last.result.status if last else "not measured",
    )


def _tone(row: Trend, *, more_is_better: bool) -> Tone:
    if row.lost:
        return "bad"
    if not row.turns:
        return ""
    return "good" if (row.turns[-1].change > 0) == more_is_better else "bad"


def _turn_note(row: Trend, names: Sequence[str]) -> str:
    said = []
    for turn in row.turns:
        around = "; ".join(map(str, turn.coincides)) or "no difference of the environment is recorded"
        said.append(f"{written(turn.change, 'percent')} % at {names[turn.at]}: {around}")
    return f"{row.cell.result.label} {row.cell.result.case.label()} {row.cell.direction} {', '.join(said)}"


def _curve(columns: Sequence[str]) -> Callable[[dict[str, Any]], str]:
    """What draws a row's relative values as one character a sweep, blank where there is none."""

    def draw(values: dict[str, Any]) -> str:
        present = [values[name] for name in columns if values[name] is not None]
        low, high = min(present), max(present)
        height = max(high - low, _FULL_HEIGHT)
        floor = (low + high - height) / 2
        return "".join(" " if values[name] is None else _level((values[name] - floor) / height) for name in columns)

    return draw


def _level(share: float) -> str:
    return _LEVELS[min(len(_LEVELS) - 1, max(0, math.floor(share * len(_LEVELS))))]
