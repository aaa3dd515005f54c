"""Standing: one cell among its rivals."""

from dataclasses import dataclass

from attn_exp.compare.cell import Cell
from attn_exp.compare.ratio import Ratio


@dataclass(frozen=True, slots=True)
class Standing:
    """One cell among the rivals of its case and pass.

    `gain` is how many times better it is than the baseline; without a baseline than the best, so at most 1. None for
    a cell without a value, and where the baseline has none. `best` marks the best and all that cannot be told from it.
    """

    cell: Cell
    group: int
    gain: Ratio | None
    best: bool
