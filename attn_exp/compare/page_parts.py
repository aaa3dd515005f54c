"""What the pages of all kinds of comparison have in common."""

import time
from collections.abc import Sequence
from typing import Any

from attn_exp.case import Case, case_columns
from attn_exp.compare.cell import Cell, Metric
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.duels import Duel
from attn_exp.compare.sheet import Column, Sheet, written

# More varying fields of a case than this stand in tables as one label.
_MOST_COLUMNS = 5


def case_part(cells: Sequence[Cell]) -> tuple[dict[str, Any], tuple[Column, ...]]:
    """What all cells share of model, case, timer and device; and columns for those, shown only where they vary.

    Where so much of the case varies that no table would hold it, tables have the case's label instead.
    """
    names = ("model", *case_columns(), "timer", "device")
    several = [
        len({repr(value) for value in values}) > 1
        for values in zip(*(case_values(cell)[:-1] for cell in cells), strict=True)
    ]
    first = case_values(cells[0])[:-1]
    shared = {name: value for name, value, many in zip(names, first, several, strict=True) if not many}
    of_case = [name for name, many in zip(names, several, strict=True) if many and name in case_columns()]
    labelled = len(of_case) > _MOST_COLUMNS
    columns = [
        Column(
            name,
            name if many and not (labelled and name in of_case) else "",
            spare=4 if name in ("model", "device") else 0,
        )
        for name, many in zip(names, several, strict=True)
    ]
    label = Column("case", "case" if labelled else "", joined=_case_label)
    return {name: value for name, value in shared.items() if value is not None}, (*columns, label)


def _case_label(values: dict[str, Any]) -> str:
    return Case(**{name: values[name] for name in case_columns()}).label()


def case_values(cell: Cell) -> tuple[Any, ...]:
    """The values of the columns of `case_part`; the label is made of the others."""
    result = cell.result
    case = tuple(getattr(result.case, name) for name in case_columns())
    return (result.model, *case, result.measuring.timer, result.device, None)


def value_columns(metric: Metric, prefix: str = "", head: str = "") -> tuple[Column, ...]:
    """The columns of a cell's value; beside a time its rate."""
    extra = (Column(f"{prefix}tflops", "TFLOPS" if not prefix else "", "figure", spare=3),)
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


def reasons(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each reason why cells have no value."""
    found = dict.fromkeys(
        f"{cell.result.label} {cell.result.status}: {cell.result.reason}" for cell in cells if cell.result.reason
    )
    return list(found)
