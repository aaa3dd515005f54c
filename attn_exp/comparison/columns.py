"""The columns that the tables of all kinds of comparison share: the case, and a cell's value."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from attn_exp.core.case.case import Case
from attn_exp.core.case.features import SWITCHES
from attn_exp.core.case.fields import MASK_FIELDS, case_columns, with_mask
from attn_exp.core.sheet.sheet import Column
from attn_exp.results.cell import Cell, ChosenMetric

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
