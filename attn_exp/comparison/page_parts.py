"""Parts that the pages of all kinds of comparison share."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

from attn_exp.comparison.comparison import Comparison
from attn_exp.core.case.case import Case
from attn_exp.core.case.features import SWITCHES
from attn_exp.core.case.fields import MASK_FIELDS, case_columns, with_mask
from attn_exp.core.record.flags import FLAGS, flag_notes
from attn_exp.core.sheet.sheet import Column, Page, Sheet, Tone, written
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.duel_command import Duel
from attn_exp.results.read import counted_of
from attn_exp.results.result import Result


def detailed(page: Page, comparison: Comparison, cells: Sequence[Cell]) -> Page:
    """Return the page with its details and the notes that they make redundant."""
    results = list({id(cell.result): cell.result for cell in cells}.values())
    flags = [flag for result in results for flag in result.flags]
    sheets = [*_flags(Counter(flags)), *_statuses(cells), *_environments(comparison)]
    redundant = [*flag_notes(flags), *reasons(cells), *differing_notes(comparison)]
    warnings = (
        *page.headline.warnings,
        *_missing(comparison),
        *_failed(results),
        *differing_notes(comparison),
        *comparison.broken,
    )
    return replace(
        page,
        details=tuple(sheets),
        detailed=frozenset(redundant),
        headline=replace(page.headline, warnings=warnings),
        made_by=tuple(dict.fromkeys(sweep.command for sweep in comparison.sweeps if sweep.command)),
    )


def _missing(comparison: Comparison) -> list[str]:
    """Return a sentence for each sweep that lacks jobs that its command is for."""
    return [
        f"{run.name}: {run.planned - run.records} of {run.planned} jobs have no record yet; its command measures them"
        for run in comparison.sweeps
        if run.planned is not None and run.planned > run.records
    ]


def _failed(results: Sequence[Result]) -> list[str]:
    """Return a sentence that says how many jobs have no result."""
    counts = Counter(result.status for result in results if result.status != "ok")
    if not counts:
        return []
    each = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return [f"{counts.total()} of {len(results)} jobs have no result ({each})"]


def _flags(counts: Counter[str]) -> list[Sheet]:
    if not counts:
        return []
    columns = (Column("flag", "flag"), Column("jobs", "jobs"), Column("says", "meaning"))
    rows = [(name, counts[name], FLAGS.get(name, ("", ""))[1]) for name in sorted(counts)]
    return [Sheet("flags", "flags", columns, tuple(rows))]


_BAD: tuple[Tone, ...] = ("bad",)


def _statuses(cells: Sequence[Cell]) -> list[Sheet]:
    results = {id(cell.result): cell.result for cell in cells}.values()
    counts = Counter((job.status, job.label, job.reason or "") for job in results if job.status != "ok")
    if not counts:
        return []
    columns = (
        Column("status", "status"),
        Column("backend", "backend"),
        Column("jobs", "jobs"),
        Column("reason", "reason"),
    )
    rows = [(status, label, counts[status, label, reason], reason) for status, label, reason in sorted(counts)]
    return [Sheet("statuses", "jobs without a result", columns, tuple(rows), _BAD * len(rows))]


def _environments(comparison: Comparison) -> list[Sheet]:
    """A row per property and a column per sweep; differences first."""
    by_sweep = [dict(sweep.environment) for sweep in comparison.sweeps]
    names = sorted({name for values in by_sweep for name in values})
    rows = [(name, *(values.get(name, "") for values in by_sweep)) for name in names]
    unlike = [len(set(row[1:])) > 1 for row in rows]
    columns = (
        Column("name", "environment"),
        *(Column(f"sweep{index}", sweep.name) for index, sweep in enumerate(comparison.sweeps)),
    )
    ordered = sorted(zip(rows, unlike, strict=True), key=lambda pair: (not pair[1], pair[0][0]))
    tones: list[Tone] = ["open" if differs else "" for _, differs in ordered]
    return (
        [Sheet("environment", "environment", columns, tuple(row for row, _ in ordered), tuple(tones))] if rows else []
    )


# If more fields of the case vary than this, tables show the case's label instead.
_MOST_COLUMNS = 5
_SIZES = attrgetter(*case_columns())
_NAMES = ("model", *case_columns(), "timer", "device")
_LENGTHS = ("q_len", "kv_len")
_AFTER_LENGTHS = _NAMES.index("kv_len") + 1


def case_part(cells: Sequence[Cell]) -> tuple[Column, ...]:
    """Return columns for model, case, timer and device, shown only where they vary.

    If too many fields of the case vary, tables show the case's label instead.
    """
    varying = [name for name, values in _values_of(cells).items() if len(values) > 1]
    of_case = {"mask" if name in MASK_FIELDS else name for name in varying if name in case_columns()}
    # Lengths of packed sequences are hundreds of numbers.
    labelled = len(of_case) > _MOST_COLUMNS or "lengths" in of_case
    shown = [name for name in varying if not (labelled and name in case_columns())]
    masked = with_mask({cell.result.case for cell in cells})
    if masked:
        shown = [name for name in shown if name not in MASK_FIELDS]
    square = "q_len" in shown and all(cell.result.case.square for cell in cells)
    if square:
        shown = [name for name in shown if name not in _LENGTHS]
    columns = [
        Column(
            name,
            name if name in shown else "",
            "dtype" if name == "dtype" else "text",
            spare=4 if name in ("model", "device") else 0,
        )
        for name in _NAMES
    ]
    # Among the sizes, as tables have the others.
    columns.insert(
        _AFTER_LENGTHS, Column("seq_len", "seq_len" if square else "", joined=lambda values: str(values["q_len"]))
    )
    return (
        *columns,
        Column("mask", "mask" if masked and not labelled else "", joined=lambda values: str(_case_of(values).mask)),
        Column("case", "case" if labelled else "", joined=lambda values: _case_of(values).label()),
    )


def shared_values(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the values of model, case, timer and device that all cells share."""
    only = {name: next(iter(values.values())) for name, values in _values_of(cells).items() if len(values) == 1}
    # A case without sinks, ALiBi or latents is like one without a softcap.
    return {name: value for name, value in only.items() if value is not None and (name not in SWITCHES or value)}


def _values_of(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Return the values that the cells have of each name, each once, by their `repr`: True is not 1."""
    columns = zip(*map(_own_values, cells), strict=True)
    return {name: {repr(value): value for value in values} for name, values in zip(_NAMES, columns, strict=True)}


def _case_of(values: dict[str, Any]) -> Case:
    return Case(**{name: values[name] for name in case_columns()})


def case_values(cell: Cell) -> tuple[Any, ...]:
    """Return the values of the columns of `case_part`; `seq_len`, mask and label are derived from the others."""
    values = _own_values(cell)
    return (*values[:_AFTER_LENGTHS], None, *values[_AFTER_LENGTHS:], None, None)


def _own_values(cell: Cell) -> tuple[Any, ...]:
    result = cell.result
    return (result.model, *_SIZES(result.case), result.measuring.timer, result.device)


def value_columns(metric: ChosenMetric) -> tuple[Column, ...]:
    """Return the columns of a cell's value; a time is followed by its rate."""
    rate = (Column("tflops", "TFLOPS", "figure", spare=3),) if metric.name == "time_us" else ()
    return (Column(metric.name, metric.kind.head, "figure"), Column("half_width", "+-%", "half", spare=5), *rate)


def cell_values(cell: Cell, metric: ChosenMetric) -> tuple[Any, ...]:
    """Return the values of `value_columns`."""
    rate = (cell.result.metrics.get(f"{cell.direction}/tflops"),) if metric.name == "time_us" else ()
    return (cell.value, cell.half_width, *rate)


def duels_sheet(duels: Sequence[Duel], name: str, title: str) -> list[Sheet]:
    """Return the sheet of duel commands; tables print them as lines."""
    if not duels:
        return []
    rows = [
        (duel.a.result.case.label(), duel.a.direction, duel.a.result.label, duel.b.result.label, duel.command)
        for duel in duels
    ]
    columns = tuple(Column(column, column) for column in ("case", "pass", "a", "b", "command"))
    return [Sheet(name, title, columns, tuple(rows))]


def about_part(comparison: Comparison) -> dict[str, Any]:
    """Return what the JSON output of every page says about its sweeps."""
    return {
        "metric": str(comparison.metric),
        "sweeps": [
            {
                "name": sweep.name,
                "place": sweep.place,
                "records": sweep.records,
                "planned": sweep.planned,
                "devices": list(sweep.devices),
                "torch": list(sweep.versions),
                "ended_at": day(sweep.ended_at),
            }
            for sweep in comparison.sweeps
        ],
        "differences": [asdict(difference) for difference in comparison.differences],
        "broken": list(comparison.broken),
    }


def head_lines(comparison: Comparison) -> list[str]:
    """Return a line per sweep: its name, number of records, device and date."""
    return [
        ", ".join(
            [
                f"{sweep.name}: {counted_of(sweep.records, sweep.planned, 'record')}",
                *sweep.devices,
                *(f"torch {version}" for version in sweep.versions),
                day(sweep.ended_at),
            ]
        )
        for sweep in comparison.sweeps
    ]


# Values that go without saying; the device is named beside them.
_DEFAULTS = {"align": ("bottom_right",), "layout": ("bhsd",), "timer": ("device", "cpu"), "device": ("cuda", "cpu")}


def shared_line(shared: dict[str, Any]) -> str:
    """Return what all rows share, in one line, under the names that one types, without defaults."""
    names = {name: name for name, value in shared.items() if value not in _DEFAULTS.get(name, ())}
    for name, same in (("kv_len", "q_len"), ("kv_heads", "q_heads"), ("value_dim", "head_dim")):
        if name in names and shared[name] == shared.get(same):
            del names[name]
            names |= {"q_len": "seq_len"} if same == "q_len" else {}
    return ", ".join(
        f"{typed} {written(shared[name], 'dtype' if name == 'dtype' else 'text')}" for name, typed in names.items()
    )


def differing_notes(comparison: Comparison) -> list[str]:
    """Return a sentence for each difference between the environments."""
    return [f"environment: {difference} (in {difference.cells} cells)" for difference in comparison.differences]


def day(seconds: float) -> str:
    """Format a time as date and minute in UTC; empty if unknown."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else ""


def reasons(cells: Sequence[Cell]) -> list[str]:
    """Return a sentence for each reason why cells have no value."""
    sentences = dict.fromkeys(
        f"{cell.result.label} {cell.result.status}: {cell.result.reason}" for cell in cells if cell.result.reason
    )
    return list(sentences)
