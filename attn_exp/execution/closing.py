"""The end of a sweep: what is made of its records, stored and printed. That is its answer, tables, plots and pages.

Nothing that fails here may cost the records and tables, which the sweep was run for: failures are reported.
"""

import contextlib
import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_exp.comparison import SHOWN
from attn_exp.core.errors import UserError, first_line
from attn_exp.core.files import own_folder, read_whole, write_whole
from attn_exp.core.host.process import without_collections
from attn_exp.core.record.profile import TREE, profile_folder
from attn_exp.core.text import colours, terminal_width
from attn_exp.execution.context import SweepContext
from attn_exp.execution.progress import Progress
from attn_exp.execution.summary import curves, summary_of
from attn_exp.results.read import Sweep, read_folder
from attn_exp.results.result import Result, named
from attn_exp.results.store import keep_planned, sweep_words, user_path
from attn_exp.results.table import FORMATS, check_columns, rendered, write_tables
from attn_exp.tracking.base import Curve, EndStatus

if TYPE_CHECKING:
    from attn_exp.comparison.rivals import Rivals

# A single job needs no plot, and is no rival.
FEWEST = 2
FOLDER = "plots"
REPORT = "report.html"
# No further plot is started after so long: nobody should have to wait for plots that they did not ask for.
LIMIT_S = 2.5
_LONGEST = 300
# Rows of the table at a sweep's end; `attn-exp compare` shows all.
_ROWS_AT_THE_END = 40
# Rows of the report: writing many thousands takes seconds, and `attn-exp compare` writes them when they are wanted.
_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a sweep prints and draws at its end: the keys `columns`, `show`, `format` and `save_plots`."""

    columns: tuple[str, ...] = ()
    show: str = "auto"
    format: str = "table"
    save_plots: bool = True

    @staticmethod
    def of(options: Mapping[str, Any]) -> "Output":
        """Return what a resolved configuration asks for. Raises UserError."""
        for name, choices in (("format", FORMATS), ("show", SHOWN)):
            if options[name] not in choices:
                raise UserError(f"{name}={options[name]} is none of {', '.join(choices)}")
        columns = check_columns(options["columns"])
        return Output(**{name: options[name] for name in ("show", "format", "save_plots")}, columns=columns)


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of one command's sweep.

    Attributes:
        say: prints a line, beside results for programs on standard error.
        resume: the command that finishes the sweep.
        prints: whether results are printed; a caller from Python takes them itself.
        impossible: the combinations that were left out, and why.
        aside: where records that could not be read were put.
    """

    context: SweepContext
    progress: Progress
    output: Output
    say: Callable[[str], None]
    resume: str
    prints: bool
    impossible: Sequence[str] = ()
    aside: Sequence[str] = ()

    def finish(self, status: EndStatus) -> tuple[bool, bool]:
        """Write, store and print what a sweep ends with.

        Returns:
            Whether no job has a number though one was not unsupported, and whether the tracker lacks something.
        """
        folder, tracker, say, line = self.context.folder, self.context.tracker, self.say, self.progress.line
        keep_planned(folder, self.progress.total)
        line.show("reading the records")
        sweep = read_folder(folder, may_be_empty=True)
        results = sweep.results
        files = [folder / "command.txt"]
        try:
            files += write_tables(results, folder, self.output.columns)
        except OSError as error:
            say(f"table.txt and table.csv are not written: {error.strerror}")
        # Only now, when nothing is being measured; and not after an interrupt, which should end at once.
        line.show("drawing plots and storing the sweep")
        rivals = ranked_rivals(sweep, say, self.output.show) if status == "FINISHED" else None
        plots, drawn, reports = list[Path](), list[Curve](), list[Path]()
        if self.output.save_plots:
            plots, drawn = plots_and_curves(sweep, rivals, say, self.progress.note)
            reports = write_report(rivals, plots, folder, say)
        profiled = any(result.profiles for result in results) and status == "FINISHED"
        trees = write_tree(results, folder, say) if profiled else []
        summary = replace(
            summary_of(results, rivals, say, sweep.planned),
            files=[*files, *plots, *reports, *trees],
            curves=drawn,
            job_files=write_pages(results, say) if profiled else {},
        )
        limit_s = 1.0 if status == "KILLED" else math.inf
        warning = tracker.close(status, summary, timeout_s=limit_s, told=line.show)
        if status == "KILLED":
            left = max(0, self.progress.total - sum(result.final for result in results))
            say(f"stopped with {left} of {self.progress.total} jobs to do; finish with: {self.resume}")
        else:
            self._print(status, results, rivals)
        for text in (*(f"skipped: {broken}" for broken in sweep.broken), *self.aside):
            say(text)
        if warning and status != "KILLED":  # after an interrupt the same command stores the rest
            say(warning)
        if note := tracker.note():
            say(note)
        if status == "FINISHED" and self.prints:
            self._say_what_next(results, None if warning else tracker.look(), reports, compares=rivals is not None)
        statuses = {result.status for result in results}
        return bool(statuses - {"unsupported"}) and "ok" not in statuses, tracker.lacks

    def _print(self, status: EndStatus, results: Sequence[Result], rivals: "Rivals | None") -> None:
        progress = self.progress
        if progress.kept and (status == "FINISHED" or progress.done):
            self.say(f"{progress.kept} of {progress.total} jobs were done before and are kept")
        # Otherwise nothing was measured, and an error says why.
        if self.prints and (progress.done or status == "FINISHED"):
            progress.say(self._shown(results, rivals, terminal_width(sys.stdout)))
        if why := progress.unwritten:
            self.say(f"the results could not be written ({why}): table.csv in {user_path(self.context.folder)} has all")
        for text in self.impossible:
            self.say(f"left out, impossible: {text}")

    def _shown(self, results: Sequence[Result], rivals: "Rivals | None", width: int) -> str:
        """Return the results in the chosen format: of several backends who is fastest, else a line for each job."""
        form, columns = self.output.format, self.output.columns
        if form == "table" and rivals is not None and rivals.answer.headline() and not columns:
            from attn_exp.comparison.pages import end_page
            from attn_exp.core.sheet.render import text_of

            return "\n" + text_of(end_page(rivals), width=width, colour=colours(sys.stdout), limit=_ROWS_AT_THE_END)
        text = rendered(results, form, width, rivals.answer.lines() if rivals else [], columns)
        return f"\n{text}" if form == "table" else text

    def _say_what_next(
        self, results: Sequence[Result], look: str | None, reports: Sequence[Path], *, compares: bool
    ) -> None:
        say, folder = self.say, self.context.folder
        if failed := sum(not result.final for result in results):
            say(f"{failed} job{'s' * (failed != 1)} without a result; try again with: {self.resume}")
        say(f"records and table.csv are in {user_path(folder)}")
        if look:
            say(f"look at them {look}")
        for report in reports:
            say(f"report with plots: {user_path(report)}")
        if compares:
            say(f"compare: {shlex.join(['attn-exp', 'compare', *sweep_words(folder)])}")
        if (look or compares) and shutil.which("attn-exp") is None:
            say(f'to find these commands: export PATH="{Path(sys.executable).parent}:$PATH"')
        if any(result.profiles for result in results):
            say(f"what bounds each job: attn-exp explain {self.context.name}")


@contextlib.contextmanager
def _told(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say that there is no such thing if making it fails."""
    try:
        yield
    except Exception as error:
        say(f"no {what}: {first_line(error)[:_LONGEST]}")


def ranked_rivals(sweep: Sweep, say: Callable[[str], None], show: str = "auto") -> "Rivals | None":
    """Return a sweep's backends, ranked; None if there is nothing to rank. `show` is what their table shows."""
    if sum(result.status == "ok" for result in sweep.results) < FEWEST:
        return None
    with _told("answer and no plots", say):
        from attn_exp.comparison.answer import compare_read
        from attn_exp.comparison.choice import Choice
        from attn_exp.comparison.rivals import Rivals

        found = compare_read(Choice(show=show), [sweep])
        assert isinstance(found, Rivals)
        return found
    return None


def plots_and_curves(
    sweep: Sweep, rivals: "Rivals | None", say: Callable[[str], None], note: Callable[[str], None] = lambda text: None
) -> tuple[list[Path], list[Curve]]:
    """Draw the plots of ranked backends into their sweep's folder and return them with its curves.

    `note` is told if there was no time for all plots.
    """
    if rivals is None:
        return [], []
    plots, drawn = list[Path](), list[Curve]()

    def left_out() -> None:
        note(
            f"not all plots were drawn within {LIMIT_S:g} s; all of them:\n"
            f"{shlex.join(['attn-exp', 'compare', str(user_path(Path(sweep.place))), 'plots=plots'])}"
        )

    with _told("plots", say):
        drawn = curves(sweep.results)
        from attn_exp.plots.all import write_charts

        # Importing and drawing makes many objects that stay: looking for garbage among them takes a tenth of it.
        with without_collections():
            plots = write_charts(rivals, own_folder(Path(sweep.place) / FOLDER), limit_s=LIMIT_S, left_out=left_out)
    return plots, drawn


def write_report(
    rivals: "Rivals | None", plots: Sequence[Path], folder: Path, say: Callable[[str], None]
) -> list[Path]:
    """Write the report of ranked backends into their sweep's folder, with the plots that are drawn; return its path."""
    if rivals is None:
        return []
    with _told("report", say):
        from attn_exp.comparison.pages import page
        from attn_exp.core.sheet.render import text_of
        from attn_exp.core.sheet.sheet import Picture

        drawn = [(path.stem, read_whole(path).decode()) for path in plots if path.suffix == ".svg"]
        pictures = [
            Picture(name.replace("_", " "), "", text[text.index("<svg") :], titled=True) for name, text in drawn
        ]
        write_whole(folder / REPORT, f"{text_of(page(rivals), 'html', limit=_ROWS, pictures=pictures)}\n".encode())
        return [folder / REPORT]
    return []


def write_pages(results: Sequence[Result], say: Callable[[str], None]) -> dict[str, Sequence[Path]]:
    """Write the page of each profiled job; return them by job."""
    from attn_exp.explain.page import keep_pages

    with _told("pages of profiled jobs", say):
        return keep_pages(results)
    return {}


def write_tree(results: Sequence[Result], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Write the trees of all jobs that Proton profiled as one, with a scope for each job; return its path."""
    trees = {
        f"{one.label} {one.case.label()}": profile_folder(one.path.parent, "proton") / TREE for one in named(results)
    }
    trees = {name: path for name, path in trees.items() if path.is_file()}
    with _told("tree of all profiled jobs", say):
        if len(trees) >= FEWEST:
            write_whole(folder / TREE, joined(trees))
            return [folder / TREE]
    return []


def joined(trees: Mapping[str, Path]) -> bytes:
    """Return the trees of several hatchet files as one file, each below a scope of its name."""
    files = {name: json.loads(path.read_bytes()) for name, path in trees.items()}
    first, *devices = next(iter(files.values()))
    scopes = [
        {"frame": {"name": name, "type": "function"}, "metrics": {}, "children": root["children"]}
        for name, (root, *_) in files.items()
    ]
    return json.dumps([{**first, "children": scopes}, *devices]).encode()
