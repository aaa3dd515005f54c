"""The common base of all comparisons: sweeps, metric, notes, and rows as a sheet."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attn_exp.comparison.environment import Difference
from attn_exp.core.case.case import PASSES, Case
from attn_exp.core.case.fields import case_columns
from attn_exp.core.sheet.sheet import Sheet
from attn_exp.core.sheet.web import html_table
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.fields import sortable
from attn_exp.results.read import Sweep, frame
from attn_exp.results.result import Result

if TYPE_CHECKING:
    import pandas


# How many sweeps a printed comparison names.
_NAMES = 4


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(ABC):
    """A comparison, computed once; tables, files and plots only show it.

    `rows` have a `cell` each, `notes` are sentences for the reader, and `differences` are the differences between the
    environments.
    """

    metric: ChosenMetric
    sweeps: tuple[Sweep, ...]
    rows: tuple[Any, ...]
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[str, ...]:
        """Which files could not be read, and why, a sentence each."""
        return tuple(sentence for sweep in self.sweeps for sentence in sweep.broken)

    @property
    def results(self) -> list[Result]:
        """The distinct results of its rows; of several sweeps, the latest ones."""
        return list({id(row.cell.result): row.cell.result for row in self.rows}.values())

    @abstractmethod
    def sheet(self) -> Sheet:
        """Return the rows with all their columns: what `format=csv` writes."""

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.sweeps[:_NAMES]) + (", ..." if len(self.sweeps) > _NAMES else "")
        count = len(self.sheet().rows)
        return f"<{type(self).__name__} of {names} by {self.metric}: {count} {'row' if count == 1 else 'rows'}>"

    def _repr_html_(self) -> str:
        return html_table(repr(self), self.sheet())

    def to_frame(self) -> "pandas.DataFrame":
        """Return the rows as a pandas DataFrame: the columns of `format=csv`, with numbers as numbers.

        Raises UserError if pandas is not installed.
        """
        return frame(self.sheet().dictionaries())


# Each case has a cell of each backend and pass, and they are sorted more than once.
@lru_cache(1 << 14)
def _sizes(case: Case) -> tuple[Any, ...]:
    return tuple(sortable(getattr(case, name)) for name in case_columns())


def case_order(cell: Cell) -> tuple[Any, ...]:
    """Return the sort key of cells: cases by size, backends of one case adjacent."""
    return (
        cell.result.model,
        *_sizes(cell.result.case),
        PASSES.index(cell.direction),
        cell.result.label,
        cell.result.job,
    )
