"""A sweep as `attn_exp.run` and `attn_exp.load` return it: its rows, its answer, plots and report."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.comparison.answer import compare_read
from attn_exp.comparison.choice import Choice
from attn_exp.comparison.fastest import Answer
from attn_exp.comparison.rivals import Rivals
from attn_exp.core.errors import UserError, nearest
from attn_exp.results import read
from attn_exp.results.result import Result

if TYPE_CHECKING:
    from attn_exp.plots.style import Chart


class Sweep(read.Sweep):
    """The results of one sweep, ordered by job name.

    A loop over it yields its results. A notebook shows its answer and its first rows.

    Attributes:
        name: the sweep's name.
        place: its folder, or its address in an MLflow store.
        results: its records without samples; `.record()` of one reads those too.
        broken: which files could not be read, and why, a sentence each.
        command: the command that measured it; empty if unknown.
        planned: how many jobs that command is for; None if unknown.
    """

    @classmethod
    def of(cls, sweep: read.Sweep) -> "Sweep":
        """Return a sweep that was read with what this class adds."""
        return cls(sweep.name, sweep.place, sweep.results, sweep.broken, sweep.command, sweep.planned)

    def __iter__(self) -> Iterator[Result]:
        """Yield the results."""
        return iter(self.results)

    def __len__(self) -> int:
        """Return the number of results."""
        return len(self.results)

    @cached_property
    def rivals(self) -> Rivals:
        """The backends compared with each other, case by case, by time; `attn_exp.compare` has options for it.

        Raises:
            UserError: there is no record that can be read.
        """
        if not self.results:
            raise UserError(f"{self.name or 'the sweep'} has no results yet: run it without dry_run=True")
        compared = compare_read(Choice(), [self])
        assert isinstance(compared, Rivals)
        return compared

    @property
    def answer(self) -> Answer:
        """Which backend is fastest where, and by how much; `print(sweep.answer)` says it.

        Raises:
            UserError: there is no record that can be read.
        """
        return self.rivals.answer

    def plot(self, kind: str | None = None) -> "Chart":
        """Draw one of the sweep's plots. A notebook shows it, `.save(FOLDER)` writes it, `.figure` is matplotlib's.

        Args:
            kind: `heatmap` (speed-ups by case), `lengths` (TFLOPS against sequence length), `roofline`, `accuracy`
                (errors against speed), `samples` (times in microseconds) or `bandwidth`.
                By default the first of these that its results give.

        Raises:
            UserError: there is no such plot, its results do not give it, or matplotlib is not installed.
        """
        from attn_exp.plots.all import KINDS, charts, draws

        if kind is not None and kind not in KINDS:
            raise UserError(f"there is no plot '{kind}': {nearest(kind, KINDS)}the plots are {', '.join(KINDS)}")
        drawn = draws(self.rivals)[kind]() if kind else next(charts(self.rivals), None)
        if drawn is None:
            raise UserError(f"the results of {self.name} give no plot{f' {kind}' if kind else ''}")
        return drawn

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the report that `attn-exp compare` writes with `out=`, and return its path.

        Args:
            path: the file. Its ending decides the format: `.html`, with plots inside, `.md`, `.csv`, `.json` or
                `.txt`.

        Raises:
            UserError: the file cannot be written, or there is no record that can be read.
        """
        from attn_exp.commands.compare import write_report

        return write_report(self.rivals, Path(path))

    def save(self, name: str, *, replace: bool = False) -> Path:
        """Keep the records as a baseline, for `attn_exp.compare(later, name)`, and return its path.

        Baselines lie in the folder `baselines` beside the folder of sweeps.

        Args:
            name: the baseline's name.
            replace: begin the baseline anew, without its earlier runs.

        Raises:
            UserError: the baseline cannot be written.
        """
        from attn_exp.results.baselines import keep_baseline

        return keep_baseline(self, name, Path(self.place).parent, replace=replace)

    def _repr_html_(self) -> str:
        return (self.answer._repr_html_() if self.results else "") + super()._repr_html_()
