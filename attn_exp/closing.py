"""Closing: what a sweep's end adds to its tables: plots, and curves for the tracker. Never at the sweep's expense."""

from collections.abc import Callable, Sequence
from pathlib import Path

from attn_exp.errors import first_line
from attn_exp.trackers.base import Curve

FOLDER = "plots"
# No further plot is begun after so long: nobody should wait for pictures that they did not ask for.
LIMIT_S = 2.5
# One job needs no picture.
_FEWEST = 2
_LONGEST = 300


def extras(folder: Path, say: Callable[[str], None]) -> tuple[list[Path], Sequence[Curve]]:
    """The plots and curves of the sweep in a folder; what could not be drawn is said in a sentence, never raised."""
    from attn_exp.compare.answer import compare_read
    from attn_exp.compare.choice import Choice
    from attn_exp.compare.read import read_folder
    from attn_exp.curves import curves

    # Whatever goes wrong here, the records and tables are what the sweep was run for.
    try:
        sweep = read_folder(folder)
        if sum(result.status == "ok" for result in sweep.results) < _FEWEST:
            return [], []
        found = curves(sweep.results)
    except Exception as error:
        say(f"no curves or plots: {first_line(error)[:_LONGEST]}")
        return [], []
    try:
        from attn_exp.charts.all import write_charts

        return write_charts(compare_read(Choice(), [sweep]), folder / FOLDER, limit_s=LIMIT_S), found
    except Exception as error:
        say(f"no plots: {first_line(error)[:_LONGEST]}")
        return [], found


def pages(folder: Path, say: Callable[[str], None], *, pictures: bool) -> dict[str, Sequence[Path]]:
    """The page and picture of every profiled job of the sweep in a folder, by job; why not is said, never raised."""
    from attn_exp.explain.keep import keep_pages

    # As above: what is written about records must not cost them.
    try:
        return {kept.job: kept.files for kept in keep_pages(folder, pictures=pictures)}
    except Exception as error:
        say(f"no pages of profiled jobs: {first_line(error)[:_LONGEST]}")
        return {}
