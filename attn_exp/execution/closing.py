"""Outputs made of a sweep's records at its end: its answer, plots and curves, and the pages of profiled jobs.

Nothing that fails here may cost the records and tables, which the sweep was run for: failures are reported.
"""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.core.errors import first_line
from attn_exp.core.files import own_folder, read_whole, write_whole
from attn_exp.core.host.process import without_collections
from attn_exp.core.record.profile import TREE, profile_folder
from attn_exp.results.read import Sweep
from attn_exp.results.result import Result, named
from attn_exp.results.store import user_path
from attn_exp.tracking.base import Curve

if TYPE_CHECKING:
    from attn_exp.comparison.rivals import Rivals

# A single job needs no plot, and is no rival.
FEWEST = 2
FOLDER = "plots"
REPORT = "report.html"
# No further plot is started after so long: nobody should have to wait for plots that they did not ask for.
LIMIT_S = 2.5
_LONGEST = 300
# Rows of the report: writing many thousands takes seconds, and `attn-exp compare` writes them when they are wanted.
_ROWS = 1000


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
) -> tuple[list[Path], Sequence[Curve]]:
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
        from attn_exp.execution.summary import curves

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
