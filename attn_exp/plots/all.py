"""All charts of a comparison that its content allows, in the order of a report."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.comparison.comparison import Comparison
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
    for draw in draws(comparison).values():
        if (chart := draw()) is not None:
            yield chart


def draws(comparison: Comparison) -> dict[str, Callable[[], Chart | None]]:
    """Return what draws each chart of a comparison by the chart's name; None comes of it if the results give none.

    Raises UserError if matplotlib is not installed.
    """
    if not available():
        raise UserError(MISSING)
    results = one_each(comparison.results)
    found: dict[str, Callable[[], Chart | None]] = {name: partial(draw, results) for name, draw in _OF_RESULTS.items()}
    return {"heatmap": partial(heatmap_chart, comparison), **found} if isinstance(comparison, Rivals) else found


def pictures(comparison: Comparison) -> list[Picture]:
    """Return the charts of a comparison as pictures of a report. Raises UserError if matplotlib is not installed."""
    return [Picture(chart.title, chart.caption, svg(chart, bare=True)) for chart in charts(comparison)]


def write_charts(
    comparison: Comparison, folder: Path, *, limit_s: float = math.inf, left_out: Callable[[], None] = lambda: None
) -> list[Path]:
    """Write all charts as SVG and PNG and return their paths. After `limit_s` seconds no further one is started.

    `left_out` is called if the time did not suffice for all. Raises UserError if matplotlib is not installed, or the
    folder cannot be written.
    """
    began, written = time.monotonic(), list[Path]()
    for draw in draws(comparison).values():
        if written and time.monotonic() - began > limit_s:
            left_out()
            break
        if (chart := draw()) is not None:
            written += chart.save(folder)
    return written
