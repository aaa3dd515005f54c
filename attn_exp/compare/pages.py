"""Pages: each kind of comparison as sheets, lines and notes, in one place for all outputs."""

import time
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

from attn_exp.case import case_columns
from attn_exp.compare.cell import Cell, Metric
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.duels import Duel
from attn_exp.compare.means import Mean
from attn_exp.compare.picks import Pick
from attn_exp.compare.rivals import Rivals
from attn_exp.compare.sheet import Column, Page, Sheet, Tone, interval, written
from attn_exp.flags import flag_marks, flag_notes


@singledispatch
def page(comparison: Comparison) -> Page:
    """The page of a comparison of any kind."""
    raise TypeError(f"no page for {type(comparison).__name__}")


@page.register
def _(found: Rivals) -> Page:
    shared, case = case_part([row.cell for row in found.rows])
    over = f"over {found.baseline}" if found.baseline else "of the best"
    columns = (
        *case,
        Column("pass", "pass"),
        Column("backend", "backend"),
        Column("status", "" if all(row.cell.result.status == "ok" for row in found.rows) else "status"),
        *value_columns(found.metric),
        Column("gain", over, "ratio"),
        Column("gain_low", ""),
        Column("gain_high", ""),
        Column("interval", "95 %", joined=interval("gain_low", "gain_high"), spare=3),
        Column("best", "best"),
        Column("flags", ""),
        Column("marks", "marks", spare=1),
        Column("reason", ""),
        Column("job", ""),
        Column("sweep", "sweep" if len(found.sweeps) > 1 else ""),
    )
    rows = [
        (
            *case_values(row.cell),
            row.cell.direction,
            row.cell.result.label,
            row.cell.result.status,
            *cell_values(row.cell, found.metric),
            *((row.gain.value, row.gain.low, row.gain.high) if row.gain else (None, None, None)),
            None,
            "*" if row.best else "",
            " ".join(row.cell.result.flags),
            flag_marks(row.cell.result.flags),
            row.cell.result.reason or "",
            row.cell.result.job,
            row.cell.result.sweep,
        )
        for row in found.rows
    ]
    tones: list[Tone] = ["bad" if row.cell.value is None else "best" if row.best else "" for row in found.rows]
    sheets = [
        Sheet("rows", "", columns, tuple(rows), tuple(tones)),
        *means_sheet(found.means, found.by, found.baseline),
        *_picks_sheet(found.picks),
        *duels_sheet(found.ties, "ties", "not told apart; side by side they would be"),
    ]
    about = about_part(found) | {"kind": "rivals", "baseline": found.baseline, "by": list(found.by), "shared": shared}
    notes = [
        *found.notes,
        *differing_notes(found),
        *flag_notes(flag for row in found.rows for flag in row.cell.result.flags),
        *_reasons([row.cell for row in found.rows]),
    ]
    return Page(about, (*head_lines(found), shared_line(shared)), tuple(sheets), tuple(notes))


def case_part(cells: Sequence[Cell]) -> tuple[dict[str, Any], tuple[Column, ...]]:
    """What all cells share of model, case, timer and device; and columns for those, shown only where they vary."""
    names = ("model", *case_columns(), "timer", "device")
    columns, shared = [], {}
    for position, name in enumerate(names):
        values = {repr(value): value for cell in cells for value in [case_values(cell)[position]]}
        if len(values) == 1:
            shared[name] = next(iter(values.values()))
        columns.append(Column(name, "" if len(values) <= 1 else name, spare=4 if name in ("model", "device") else 0))
    return {name: value for name, value in shared.items() if value is not None}, tuple(columns)


def case_values(cell: Cell) -> tuple[Any, ...]:
    """The values of the columns of `case_part`."""
    result = cell.result
    case = tuple(getattr(result.case, name) for name in case_columns())
    return (result.model, *case, result.measuring.timer, result.device)


def value_columns(metric: Metric, prefix: str = "", head: str = "") -> tuple[Column, ...]:
    """The columns of a cell's value; beside a time its rate."""
    extra = (Column(f"{prefix}tflops", "TFLOPS" if not prefix else "", "figure", spare=2),)
    return (
        Column(f"{prefix}{metric.name}", head or metric.head, "figure"),
        Column(f"{prefix}half_width", "" if prefix else "+-%", "half", spare=5),
        *(extra if metric.name == "time_us" else ()),
    )


def cell_values(cell: Cell | None, metric: Metric) -> tuple[Any, ...]:
    """The values of `value_columns`."""
    extra = 1 if metric.name == "time_us" else 0
    if cell is None:
        return (None,) * (2 + extra)
    return (cell.value, cell.half, *([cell.result.metrics.get(f"{cell.direction}/tflops")] * extra))


def means_sheet(means: Sequence[Mean], by: Sequence[str], baseline: str | None) -> list[Sheet]:
    """The geometric means, none if there is no more than one backend."""
    if len({mean.label for mean in means}) < 2:
        return []
    columns = (
        *(Column(name, name) for name in by),
        Column("pass", "pass"),
        Column("backend", "backend"),
        Column("mean_gain", f"over {baseline}" if baseline else "of the best", "ratio"),
        Column("least", "least", "ratio"),
        Column("most", "most", "ratio"),
        Column("n", "n"),
        Column("best", "best in"),
        Column("left_out", "left out"),
    )
    rows = [
        (
            *mean.group,
            mean.direction,
            mean.label,
            mean.value,
            mean.least,
            mean.most,
            mean.n,
            mean.best,
            ", ".join(f"{count} {why}" for why, count in mean.left_out),
        )
        for mean in means
    ]
    return [Sheet("means", "geometric means over n cases", columns, tuple(rows))]


def duels_sheet(duels: Sequence[Duel], name: str, title: str) -> list[Sheet]:
    """The commands that would decide; tables show them as lines, not as columns."""
    if not duels:
        return []
    rows = [
        (one.a.result.case.label(), one.a.direction, one.a.result.label, one.b.result.label, one.command)
        for one in duels
    ]
    columns = tuple(Column(column, column) for column in ("case", "pass", "a", "b", "command"))
    return [Sheet(name, title, columns, tuple(rows))]


def _picks_sheet(picks: Sequence[Pick]) -> list[Sheet]:
    if not picks or all(not pick.ties and pick.ahead is None for pick in picks):
        return []
    names = [name for name, _ in picks[0].shape]
    axis = picks[0].axis
    columns = (
        Column("pass", "pass"),
        *(Column(name, name) for name in names),
        *((Column(f"{axis}_from", f"{axis} from"), Column(f"{axis}_to", "to")) if axis else ()),
        Column("pick", "pick"),
        Column("ties", "not told from it"),
        Column("ahead", "ahead of the rest", "ratio"),
        Column("n", "cases"),
    )
    rows = [
        (
            pick.direction,
            *(value for _, value in pick.shape),
            *((pick.low, pick.high) if axis else ()),
            pick.label,
            " ".join(pick.ties),
            pick.ahead,
            pick.n,
        )
        for pick in picks
    ]
    return [Sheet("picks", "pick this", columns, tuple(rows))]


def about_part(found: Comparison) -> dict[str, Any]:
    """What every page says of its sweeps."""
    return {
        "metric": str(found.metric),
        "sweeps": [
            {
                "name": one.name,
                "place": one.place,
                "records": one.records,
                "devices": list(one.devices),
                "torch": list(one.versions),
                "ended_at": day(one.ended_at),
            }
            for one in found.sweeps
        ],
        "differences": [
            {"name": one.name, "old": one.old, "new": one.new, "cells": one.cells, "refuses": one.refuses}
            for one in found.differences
        ],
        "broken": list(found.broken),
    }


def head_lines(found: Comparison) -> list[str]:
    """A line a sweep: its name, records, device, date."""
    return [
        ", ".join(
            [
                f"{one.name}: {one.records} records",
                *one.devices,
                *(f"torch {version}" for version in one.versions),
                day(one.ended_at),
            ]
        )
        for one in found.sweeps
    ]


def shared_line(shared: dict[str, Any]) -> str:
    """What all rows share, in one line."""
    return ", ".join(f"{name} {written(value, 'text')}" for name, value in shared.items())


def differing_notes(found: Comparison) -> list[str]:
    """A sentence for each difference of the environments."""
    return [f"environment: {one} (in {one.cells} cells)" for one in found.differences]


def day(seconds: float) -> str:
    """Date and minute in UTC, so that a page reads the same everywhere; nothing if unknown."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else ""


def _reasons(cells: Sequence[Cell]) -> list[str]:
    found = dict.fromkeys(
        f"{cell.result.label} {cell.result.status}: {cell.result.reason}" for cell in cells if cell.result.reason
    )
    return list(found)
