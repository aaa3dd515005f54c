"""All charts of a comparison that its content allows, in the order of a report."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.comparison.changes import Changes
from attn_exp.comparison.comparison import Comparison
from attn_exp.comparison.history import History
from attn_exp.comparison.rivals import Rivals
from attn_exp.core.errors import UserError
from attn_exp.core.sheet.sheet import Picture
from attn_exp.plots.data import one_each
from attn_exp.plots.heatmap import heatmap_chart
from attn_exp.plots.lengths import bandwidth_chart, lengths_chart
from attn_exp.plots.roofline import accuracy_chart, roofline_chart
from attn_exp.plots.samples import samples_chart
from attn_exp.plots.style import MISSING, Chart, available, svg

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_OF_RESULTS: "dict[str, Callable[[Sequence[Result]], Chart | None]]" = {
    "lengths": lengths_chart,
    "roofline": roofline_chart,
    "accuracy": accuracy_chart,
    "samples": samples_chart,
    "bandwidth": bandwidth_chart,
}
# The charts of a sweep's backends by name.
KINDS = ("heatmap", *_OF_RESULTS)


def charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield the charts of a comparison, each drawn when it is requested.

    Raises UserError if matplotlib is not installed.
    """
    for draw in _draws(comparison):
        if (chart := draw()) is not None:
            yield chart


def _draws(comparison: Comparison) -> list[Callable[[], Chart | None]]:
    if not available():
        raise UserError(MISSING)
    draws: list[Callable[[], Chart | None]] = []
    if isinstance(comparison, Rivals):
        draws.append(partial(heatmap_chart, comparison))
    results = one_each(results_of(comparison))
    draws += [partial(draw, results) for draw in _OF_RESULTS.values()]
    return draws


def chart_of(rivals: Rivals, kind: str) -> Chart | None:
    """Return one of the `KINDS` of charts of a sweep's backends; None if its results do not give it.

    Raises UserError if matplotlib is not installed.
    """
    if not available():
        raise UserError(MISSING)
    return heatmap_chart(rivals) if kind == "heatmap" else _OF_RESULTS[kind](one_each(results_of(rivals)))


def pictures(comparison: Comparison) -> list[Picture]:
    """Return the charts of a comparison as pictures of a report. Raises UserError if matplotlib is not installed."""
    return [Picture(chart.title, chart.caption, svg(chart, bare=True)) for chart in charts(comparison)]


def results_of(comparison: Comparison) -> "list[Result]":
    """Return the distinct results of a comparison; of several sweeps, the latest ones."""
    if not isinstance(comparison, (Rivals, Changes, History)):
        raise TypeError(f"there are no charts for {type(comparison).__name__}")
    return list({id(row.cell.result): row.cell.result for row in comparison.rows}.values())


def write_charts(
    comparison: Comparison, folder: Path, *, limit_s: float = math.inf, left_out: Callable[[], None] = lambda: None
) -> list[Path]:
    """Write all charts as SVG and PNG and return their paths. After `limit_s` seconds no further one is started.

    `left_out` is called if the time did not suffice for all. Raises UserError if matplotlib is not installed, or the
    folder cannot be written.
    """
    began, written = time.monotonic(), list[Path]()
    for draw in _draws(comparison):
        if written and time.monotonic() - began > limit_s:
            left_out()
            break
        if (chart := draw()) is not None:
            written += chart.save(folder)
    return written
