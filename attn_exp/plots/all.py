"""All charts of a comparison that its content allows, in the order of a report."""

import time
from collections.abc import Callable, Iterator, Sequence
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
from attn_exp.plots.roofline import roofline_chart
from attn_exp.plots.samples import samples_chart
from attn_exp.plots.style import MISSING, Chart, available, save, svg

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_OF_RESULTS: "tuple[Callable[[Sequence[Result]], Chart | None], ...]" = (
    lengths_chart,
    roofline_chart,
    accuracy_chart,
    first_call_chart,
    samples_chart,
)


def charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield the charts of a comparison, each drawn when it is requested.

    Raises:
        UserError: matplotlib is not installed.
    """
    if not available():
        raise UserError(MISSING)
    own = None
    if isinstance(comparison, Rivals):
        own = heatmap_chart(comparison)
    elif isinstance(comparison, Changes):
        own = changes_chart(comparison)
    if own is not None:
        yield own
    results = one_each(results_of(comparison))
    for draw in _OF_RESULTS:
        chart = draw(results)
        if chart is not None:
            yield chart


def pictures(comparison: Comparison) -> list[Picture]:
    """Return the charts of a comparison as pictures of a report.

    Raises:
        UserError: matplotlib is not installed.
    """
    return [Picture(chart.title, chart.caption, svg(chart)) for chart in charts(comparison)]


def results_of(comparison: Comparison) -> "list[Result]":
    """Return the distinct results of a comparison; of several sweeps, the latest ones."""
    if not isinstance(comparison, (Rivals, Changes, History, Published)):
        raise TypeError(f"there are no charts for {type(comparison).__name__}")
    return list({id(row.cell.result): row.cell.result for row in comparison.rows}.values())


def write_charts(comparison: Comparison, folder: Path, *, limit_s: float | None = None) -> list[Path]:
    """Write all charts as SVG and PNG and return their paths. After `limit_s` seconds no further one is started.

    Raises:
        UserError: matplotlib is not installed, or the folder cannot be written.
    """
    began, written = time.monotonic(), []
    try:
        for chart in charts(comparison):
            folder.mkdir(parents=True, exist_ok=True)
            written += save(chart, folder)
            if limit_s is not None and time.monotonic() - began > limit_s:
                break
    except OSError as error:
        raise UserError(f"cannot write plots to {folder} ({error.strerror}): choose another folder") from error
    return written
