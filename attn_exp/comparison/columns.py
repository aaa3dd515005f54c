"""The columns that the tables of all kinds of comparison share: the case, and a cell's value.

A row is whatever has a `cell`.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from attn_exp.core.case.case import Case
from attn_exp.core.case.features import SWITCHES
from attn_exp.core.case.fields import MASK_FIELDS, case_columns, with_mask
from attn_exp.core.sheet.sheet import Column, Form, Pairs, Sheet, Tone, split
from attn_exp.results.cell import ChosenMetric

# If more fields of the case vary than this, tables show the case's label instead.
_MOST_COLUMNS = 5
_GETTERS = {
    "model": attrgetter("cell.result.model"),
    **{name: attrgetter(f"cell.result.case.{name}") for name in case_columns()},
    "timer": attrgetter("cell.result.measuring.timer"),
    "device": attrgetter("cell.result.device"),
}
_LENGTHS = ("q_len", "kv_len")
NAMES: Pairs = (
    (Column("pass", "pass"), attrgetter("cell.direction")),
    (Column("backend", "backend"), attrgetter("cell.result.label")),
)


def row_sheet(rows: Sequence[Any], pairs: Pairs, tones: Sequence[Tone] = ()) -> Sheet:
    """Return the sheet of a comparison's rows."""
    columns, values = split(pairs)
    return Sheet("rows", "", columns, tuple(map(values, rows)), tuple(tones))


def case_pairs(rows: Sequence[Any]) -> Pairs:
    """Return columns for model, case, timer and device, shown only where they vary.

    If too many fields of the case vary, tables show the case's label instead.
    """
    varying = [name for name, values in _values_of(rows).items() if len(values) > 1]
    of_case = {"mask" if name in MASK_FIELDS else name for name in varying if name in case_columns()}
    # Lengths of packed sequences are hundreds of numbers.
    labelled = len(of_case) > _MOST_COLUMNS or "lengths" in of_case
    shown = [name for name in varying if not (labelled and name in case_columns())]
    masked = with_mask({row.cell.result.case for row in rows})
    if masked:
        shown = [name for name in shown if name not in MASK_FIELDS]
    square = "q_len" in shown and all(row.cell.result.case.square for row in rows)
    if square:
        shown = [name for name in shown if name not in _LENGTHS]
    pairs: list[Any] = []
    for name, get in _GETTERS.items():
        form: Form = "dtype" if name == "dtype" else "text"
        spare = 4 if name in ("model", "device") else 0
        pairs.append((Column(name, name if name in shown else "", form, spare), get))
        if name == "kv_len":
            # Among the sizes, as tables have the others.
            seq_len = Column("seq_len", "seq_len" if square else "", joined=lambda values: str(values["q_len"]))
            pairs.append((seq_len, None))
    mask = Column("mask", "mask" if masked and not labelled else "", joined=lambda values: str(_case_of(values).mask))
    label = Column("case", "case" if labelled else "", joined=lambda values: _case_of(values).label())
    return [*pairs, (mask, None), (label, None)]


def shared_values(rows: Sequence[Any]) -> dict[str, Any]:
    """Return the values of model, case, timer and device that all rows share."""
    only = {name: next(iter(values.values())) for name, values in _values_of(rows).items() if len(values) == 1}
    # A case without sinks, ALiBi or latents is like one without a softcap.
    return {name: value for name, value in only.items() if value is not None and (name not in SWITCHES or value)}


def _values_of(rows: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the values that the rows have of each name, each once, by their `repr`: True is not 1."""
    return {name: {repr(value): value for value in map(get, rows)} for name, get in _GETTERS.items()}


def _case_of(values: dict[str, Any]) -> Case:
    return Case(**{name: values[name] for name in case_columns()})


def value_pairs(metric: ChosenMetric) -> Pairs:
    """Return the columns of a cell's value; a time is followed by its rate."""
    pairs: Pairs = (
        (Column(metric.name, metric.kind.head, "figure"), attrgetter("cell.value")),
        (Column("half_width", "+-%", "half", spare=5), attrgetter("cell.half_width")),
    )
    if metric.name != "time_us":
        return pairs
    rate = Column("tflops", "TFLOPS", "figure", spare=3)
    return [*pairs, (rate, lambda row: row.cell.result.metrics.get(f"{row.cell.direction}/tflops"))]
