"""The features of cases: in which fields the cases of a comparison differ, and what each has there."""

from collections.abc import Sequence
from typing import Any

from attn_exp.compare.ranking import Ranking
from attn_exp.core.case import Case
from attn_exp.core.case_fields import MASK_FIELDS, case_columns, typed_fields, with_mask


def features_of(rows: Sequence[Ranking]) -> list[dict[str, Any]]:
    """Return the features of each row: its pass, and the fields and ways of measuring in which rows differ.

    Both lengths are one feature, `seq_len`, if they are equal everywhere; so is the mask, if the cases have several.
    """
    sizes = _varying(rows)
    places = [_place(row) for row in rows]
    differing = [name for name in (places[0] if places else ()) if len({repr(place[name]) for place in places}) > 1]
    return [
        {"pass": row.cell.direction} | _sizes(row.cell.result.case, sizes) | {name: place[name] for name in differing}
        for row, place in zip(rows, places, strict=True)
    ]


def _sizes(case: Case, names: Sequence[str]) -> dict[str, Any]:
    values = typed_fields(case, square="seq_len" in names) | {"mask": case.mask}
    return {name: values[name] for name in names}


def _place(row: Ranking) -> dict[str, Any]:
    """Return how and on what a row was measured."""
    result = row.cell.result
    return {
        "device": result.device_name,
        "power limit": result.environment.get("power_limit_w"),
        "timer": result.measuring.timer,
        "regime": result.measuring.regime,
        "l2": result.measuring.l2,
        "inputs": result.measuring.inputs,
    }


def _varying(rows: Sequence[Ranking]) -> list[str]:
    """Return the fields in which cases differ: both lengths as `seq_len` if they are equal, several masks as `mask`."""
    cases = list(dict.fromkeys(row.cell.result.case for row in rows))
    names = [name for name in case_columns() if len({repr(getattr(case, name)) for case in cases}) > 1]
    # The word for lengths has the keys, too.
    names = list(dict.fromkeys("lengths" if name == "kv_lengths" else name for name in names))
    if all(case.lengths is not None for case in cases):
        names = [name for name in names if name not in ("q_len", "kv_len")]
    if all(case.square for case in cases) and {"q_len", "kv_len"} <= set(names):
        names = ["seq_len" if name == "q_len" else name for name in names if name != "kv_len"]
    if all(case.head_dim == case.value_dim for case in cases):
        names = [name for name in names if name != "value_dim"]
    if all(case.q_heads == case.kv_heads for case in cases):
        names = [name for name in names if name != "kv_heads"]
    if with_mask(cases):
        names = list(dict.fromkeys("mask" if name in MASK_FIELDS else name for name in names))
    return names
