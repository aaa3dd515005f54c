"""What is made of a sweep's records at its end: its answer, plots and curves, and the pages of profiled jobs.

Nothing that fails here may cost the records and tables, which the sweep was run for: failures are reported.
"""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.core.errors import first_line
from attn_exp.core.files import read_whole, unlinked, write_whole
from attn_exp.core.process import without_collections
from attn_exp.plots.task import FEWEST
from attn_exp.results.read import Sweep
from attn_exp.results.result import Result
from attn_exp.results.store import user_path
from attn_exp.run.drawing import Drawing
from attn_exp.tracking.base import Curve

if TYPE_CHECKING:
    from attn_exp.compare.rivals import Rivals

FOLDER = "plots"
REPORT = "report.html"
# No further plot is started after so long: nobody should have to wait for plots that they did not ask for.
LIMIT_S = 2.5
_LONGEST = 300
# Rows of the report: writing many thousands takes seconds, and `attn-exp compare` writes them when they are wanted.
_ROWS = 1000


def ranked_rivals(sweep: Sweep, say: Callable[[str], None]) -> "Rivals | None":
    """Return a sweep's backends, ranked; None if there is nothing to rank."""
    if sum(result.status == "ok" for result in sweep.results) < FEWEST:
        return None
    try:
        from attn_exp.compare.answer import compare_read
        from attn_exp.compare.choice import Choice
        from attn_exp.compare.rivals import Rivals

        found = compare_read(Choice(), [sweep])
        assert isinstance(found, Rivals)
        return found
    except Exception as error:
        say(f"no answer and no plots: {first_line(error)[:_LONGEST]}")
        return None


def begin_plots(folder: Path, drawing: Drawing) -> None:
    """Have a sweep's plots drawn, unless its folder for them is a link, which `plots_and_curves` says."""
    if not (folder / FOLDER).is_symlink():
        drawing.begin(folder, folder / FOLDER, LIMIT_S)


def plots_and_curves(
    sweep: Sweep,
    rivals: "Rivals | None",
    say: Callable[[str], None],
    drawing: Drawing | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[list[Path], Sequence[Curve]]:
    """Draw the plots of ranked backends into their sweep's folder and return them with its curves.

    If processes of their own were asked to draw, by `begin_plots`, they are waited for, else this one draws. `note` is
    told if there was no time for all plots.
    """
    if rivals is None:
        return [], []
    plots, drawn, into = list[Path](), list[Curve](), Path(sweep.place) / FOLDER

    def left_out() -> None:
        note(
            f"not all plots were drawn within {LIMIT_S:g} s; all of them: "
            f"{shlex.join(['attn-exp', 'compare', str(user_path(Path(sweep.place))), 'plots=plots'])}"
        )

    try:
        from attn_exp.plots.curves import curves

        drawn = curves(sweep.results)
        if drawing is not None:
            plots = drawing.files(unlinked(into), left_out)
        else:
            from attn_exp.plots.all import write_charts

            # Importing and drawing makes many objects that stay: looking for garbage among them takes a tenth of it.
            with without_collections():
                plots = write_charts(rivals, unlinked(into), limit_s=LIMIT_S, left_out=left_out)
    except Exception as error:
        say(f"no plots: {first_line(error)[:_LONGEST]}")
    return plots, drawn


def write_report(
    rivals: "Rivals | None", plots: Sequence[Path], folder: Path, say: Callable[[str], None]
) -> list[Path]:
    """Write the report of ranked backends into their sweep's folder, with the plots that are drawn; return its path."""
    if rivals is None:
        return []
    try:
        from attn_exp.compare.pages import page
        from attn_exp.compare.render import text_of
        from attn_exp.compare.sheet import Picture

        drawn = [(path.stem, read_whole(path).decode()) for path in plots if path.suffix == ".svg"]
        pictures = [
            Picture(name.replace("_", " "), "", text[text.index("<svg") :], titled=True) for name, text in drawn
        ]
        write_whole(folder / REPORT, f"{text_of(page(rivals), 'html', limit=_ROWS, pictures=pictures)}\n".encode())
        return [folder / REPORT]
    except Exception as error:
        say(f"no report: {first_line(error)[:_LONGEST]}")
        return []


def write_pages(results: Sequence[Result], say: Callable[[str], None], *, pictures: bool) -> dict[str, Sequence[Path]]:
    """Write the page and picture of each profiled job; return them by job."""
    from attn_exp.explain.page import keep_pages

    try:
        return {kept.job: kept.files for kept in keep_pages(results, pictures=pictures)}
    except Exception as error:
        say(f"no pages of profiled jobs: {first_line(error)[:_LONGEST]}")
        return {}
