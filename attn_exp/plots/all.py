"""All charts of a comparison that its content allows, in the order of a report."""

import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.compare.changes import Changes
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.history import History
from attn_exp.compare.published import Published
from attn_exp.compare.rivals import Rivals
from attn_exp.compare.sheet import Picture
from attn_exp.core.errors import UserError
from attn_exp.plots.changes import changes_chart
from attn_exp.plots.data import one_each
from attn_exp.plots.dots import accuracy_chart, first_call_chart
from attn_exp.plots.heatmap import heatmap_chart
from attn_exp.plots.lengths import lengths_chart
from attn_exp.plots.precision import precision_chart
from attn_exp.plots.roofline import roofline_chart
from attn_exp.plots.samples import samples_chart
from attn_exp.plots.style import MISSING, Chart, available, svg

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_OF_RESULTS: "dict[str, Callable[[Sequence[Result]], Chart | None]]" = {
    "lengths": lengths_chart,
    "roofline": roofline_chart,
    "accuracy": accuracy_chart,
    "precision": precision_chart,
    "first_call": first_call_chart,
    "samples": samples_chart,
}
# The charts of a sweep's backends by name.
KINDS = ("heatmap", *_OF_RESULTS)
# matplotlib's modules that draw, which are imported when they are needed.
_DRAWING = ("matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg")


def import_drawing() -> None:
    """Import what draws, ahead of the first chart. Raises ImportError without matplotlib."""
    for name in _DRAWING:
        importlib.import_module(name)


def charts(comparison: Comparison, part: int = 0, parts: int = 1) -> Iterator[Chart]:
    """Yield the charts of a comparison, each drawn when it is requested.

    Args:
        comparison: what they show.
        part: which of the equal parts of the work, from 0 on; its charts only.
        parts: how many there are.

    Raises:
        UserError: matplotlib is not installed.
    """
    for draw in _draws(comparison, part, parts):
        if (chart := draw()) is not None:
            yield chart


def _draws(comparison: Comparison, part: int, parts: int) -> list[Callable[[], Chart | None]]:
    if not available():
        raise UserError(MISSING)
    draws: list[Callable[[], Chart | None]] = [partial(_own_chart, comparison)]
    results = one_each(results_of(comparison))
    draws += [partial(draw, results) for draw in _OF_RESULTS.values()]
    # Dealt to and fro, since the first ones take longest.
    turns = [index % (2 * parts) for index in range(len(draws))]
    return [draw for draw, turn in zip(draws, turns, strict=True) if min(turn, 2 * parts - 1 - turn) == part]


def chart_of(rivals: Rivals, kind: str) -> Chart | None:
    """Return one of the `KINDS` of charts of a sweep's backends; None if its results do not give it.

    Raises:
        UserError: matplotlib is not installed.
    """
    if not available():
        raise UserError(MISSING)
    return _own_chart(rivals) if kind == "heatmap" else _OF_RESULTS[kind](one_each(results_of(rivals)))


def _own_chart(comparison: Comparison) -> Chart | None:
    """Return the chart that only this kind of comparison has."""
    if isinstance(comparison, Rivals):
        return heatmap_chart(comparison)
    return changes_chart(comparison) if isinstance(comparison, Changes) else None


def pictures(comparison: Comparison) -> list[Picture]:
    """Return the charts of a comparison as pictures of a report.

    Raises:
        UserError: matplotlib is not installed.
    """
    return [Picture(chart.title, chart.caption, svg(chart, bare=True)) for chart in charts(comparison)]


def results_of(comparison: Comparison) -> "list[Result]":
    """Return the distinct results of a comparison; of several sweeps, the latest ones."""
    if not isinstance(comparison, (Rivals, Changes, History, Published)):
        raise TypeError(f"there are no charts for {type(comparison).__name__}")
    return list({id(row.cell.result): row.cell.result for row in comparison.rows}.values())


def write_charts(
    comparison: Comparison,
    folder: Path,
    *,
    limit_s: float = math.inf,
    part: int = 0,
    parts: int = 1,
    left_out: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Write all charts as SVG and PNG and return their paths. After `limit_s` seconds no further one is started.

    `part` and `parts` are those of `charts`; `left_out` is called if the time did not suffice for all.

    Raises:
        UserError: matplotlib is not installed, or the folder cannot be written.
    """
    began, written = time.monotonic(), list[Path]()
    for draw in _draws(comparison, part, parts):
        if written and time.monotonic() - began > limit_s:
            left_out()
            break
        if (chart := draw()) is not None:
            written += chart.save(folder)
    return written
