"""Sorting: the rows of a comparison by any field, or by a number of the comparison itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attn_exp.compare.change import VERDICTS
from attn_exp.compare.changes import Changes
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.fields import fields, getter, sortable
from attn_exp.compare.history import History
from attn_exp.compare.published import Published
from attn_exp.compare.rivals import Rivals

# Numbers of a row that are no field of its cell.
_OWN: dict[type, dict[str, Callable[[Any], Any]]] = {
    Rivals: {"gain": lambda row: row.gain.value if row.gain else None},
    Changes: {"verdict": lambda row: VERDICTS.index(row.verdict), "change": lambda row: row.change},
    History: {"change": lambda row: row.change, "scatter": lambda row: row.scatter},
    Published: {"ratio": lambda row: row.ratio},
}


def sorted_rows(found: Comparison, word: str) -> Comparison:
    """The comparison with its rows sorted by a name, `-name` from the largest down; what has no value comes last.

    Raises:
        UserError: there is no such name.
    """
    assert isinstance(found, (Rivals, Changes, History, Published))
    name, down = word.removeprefix("-"), word.startswith("-")
    own = _OWN[type(found)]
    rows: tuple[Any, ...] = found.rows
    if name in own:
        get = own[name]
    else:
        of_cell = getter(name, fields([row.cell for row in rows]) | dict.fromkeys(own, _nothing), "sort=")

        def get(row: Any) -> Any:
            return of_cell(row.cell)

    present = [row for row in rows if get(row) is not None]
    missing = [row for row in rows if get(row) is None]
    changed: Any = {"rows": (*sorted(present, key=lambda row: sortable(get(row)), reverse=down), *missing)}
    return replace(found, **changed)


def _nothing(cell: Any) -> None:
    return None
