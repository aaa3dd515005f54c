"""Select cells with a filter expression such as `causal and seq_len >= 4096` (attn_exp/core/filter.py)."""

from collections.abc import Sequence
from typing import Any

from attn_exp.core.errors import UserError
from attn_exp.core.filter import Filter, typed_lists
from attn_exp.results.cell import Cell
from attn_exp.results.fields import FIELDS, distinct, fields


def chosen(cells: Sequence[Cell], expression: str) -> list[Cell]:
    """Return the cells for which the expression holds.

    Raises:
        UserError: the expression is invalid, names an unknown field, or holds for no cell.
    """
    known = fields(cells)

    def values(name: str) -> list[Any]:
        return [value for value in distinct(map(typed_lists(known[name]), cells)) if value is not None]

    filter_ = Filter(expression, known, values, FIELDS)
    test = filter_.test()
    kept = [cell for cell in cells if test(cell)]
    if not kept:
        raise UserError(f"{filter_.shown} matches none of the {len(cells)} cells: relax it")
    return kept
