"""Change: one cell in an old and a new sweep, and what is to be said of it."""

from dataclasses import dataclass
from typing import Literal

from attn_exp.compare.canary import Session
from attn_exp.compare.cell import Cell

Verdict = Literal["lost", "slower", "faster", "fixed", "undecided", "gone", "new", "failed", "same"]
# In the order in which a reader wants them.
VERDICTS: tuple[Verdict, ...] = ("lost", "slower", "faster", "fixed", "undecided", "gone", "new", "failed", "same")


@dataclass(frozen=True, slots=True)
class Change:
    """One cell in the old and the new sweep, either of which may lack it.

    `change` is the new value over the old one minus 1, the session divided out of it, `low` and `high` bound its 95 %
    interval; `spread` is the part of that which is not the cells' own. `p` is two-sided, adjusted for the number of
    cells. All None where there are no two values.
    """

    old: Cell | None
    new: Cell | None
    verdict: Verdict
    change: float | None = None
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    p: float | None = None
    session: Session | None = None

    @property
    def cell(self) -> Cell:
        """The new cell, or the old one where there is no new."""
        found = self.new or self.old
        assert found is not None
        return found

    @property
    def other_kernel(self) -> tuple[str, str] | None:
        """The longest kernels of the old and the new cell if they are not the same."""
        if self.old is None or self.new is None:
            return None
        names = [cell.result.kernels.get(cell.direction, "") for cell in (self.old, self.new)]
        return (names[0], names[1]) if names[0] and names[1] and names[0] != names[1] else None
