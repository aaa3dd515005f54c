"""A rate (TFLOPS, GB/s) over sequence length: a curve per backend, a column per pass, a row for each other size.

GB/s are drawn over the cases if they differ in more than that.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attn_exp.plots.data import caption, case_names, families, length, measured, passes_of, shared_case, size_text
from attn_exp.plots.style import SMALL, Chart, finish, handle, log_ticks, looks, new_figure
from attn_exp.results.table import table_order

if TYPE_CHECKING:
    from attn_exp.plots.style import Look
    from attn_exp.results.result import Result

_MOST_ROWS = 8
_MOST_TICKS = 9
_MOST_CASES = 60
_BARS = "Bars: 95 % confidence intervals across rounds."


def lengths_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw the families that have several lengths, at most eight with the most; None if there are none."""
    return _chart(
        families(measured(results, "tflops")), "tflops", "TFLOPS", "lengths", "TFLOPS against sequence length"
    )


def bandwidth_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw the rate of compulsory bytes over any shapes, as PyTorch's kernel-benchmark utilities plot it.

    Over the cases, unless all results are on curves over length; None if there is only one case.
    """
    several, title = measured(results, "gb_per_s"), "GB/s of compulsory bytes"
    every = families(several)
    if sum(map(len, every)) == len(several):
        return _chart(every, "gb_per_s", "GB/s", "bandwidth", f"{title} against sequence length")
    name_of = case_names(several)
    names = list(dict.fromkeys(map(name_of, sorted(several, key=table_order))))
    shown = {name: place for place, name in enumerate(names[:_MOST_CASES])}
    if len(shown) < 2:
        return None
    flat = [result for result in several if name_of(result) in shown]
    passes, style = passes_of(flat, "gb_per_s"), looks(flat)
    figure = new_figure(0.5 + 0.08 * max(map(len, shown)) + 4.0 * len(passes), 1.9 + 0.28 * len(shown))
    panels = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    apart = 0.7 / len(style)
    for panel, side in zip(panels, passes, strict=True):
        for index, (label, look) in enumerate(style.items()):
            own, rates, bars = _rates(flat, label, side, "gb_per_s")
            places = [shown[name_of(result)] + apart * (index - (len(style) - 1) / 2) for result in own]
            # No line joins cases, which have no order.
            _marks(panel, look, rates, places, xerr=bars, label=label, linestyle="none")
        panel.set_xscale("log")
        log_ticks(panel.xaxis)
        panel.set_xlabel("GB/s")
        panel.set_title(side, fontsize=10)
    panels[0].set_yticks(range(len(shown)), list(shown), fontsize=SMALL)
    panels[0].invert_yaxis()
    left_out = f"{len(names) - len(shown)} more cases are not shown." if len(names) > len(shown) else ""
    text = caption(flat, f"All: {shared_case(flat)}. {_BARS}", left_out)
    handles = [handle(look, markersize=5) for look in style.values()]
    return finish(figure, "bandwidth", title, text, handles, list(style))


def _chart(every: "list[list[Result]]", metric: str, unit: str, name: str, title: str) -> Chart | None:
    if not every:
        return None
    shown = every[:_MOST_ROWS]
    flat = [result for one in shown for result in one]
    passes = passes_of(flat, metric)
    style = looks(flat)
    name_of = case_names([one[0] for one in shown], leave_out=("q_len", "kv_len"))
    figure = new_figure(1.2 + 4.4 * len(passes), 1.9 + 1.8 * len(shown))
    panels = figure.subplots(len(shown), len(passes), squeeze=False, sharex=True, sharey="row")
    for row, together in zip(panels, shown, strict=True):
        for panel, side in zip(row, passes, strict=True):
            for label, look in style.items():
                own, rates, bars = _rates(together, label, side, metric)
                _marks(panel, look, [length(result.case) for result in own], rates, yerr=bars, label=label)
        # Rates over lengths span decades.
        row[0].set_yscale("log")
        log_ticks(row[0].yaxis)
        row[0].set_ylabel(f"{name_of(together[0])}\n{unit}".lstrip())
    for panel, side in zip(panels[0], passes, strict=True):
        panel.set_title(side, fontsize=10)
    for panel in panels[-1]:
        panel.set_xscale("log", base=2)
        panel.set_xlabel("sequence length, tokens")
    _ticks(panels[-1], sorted({length(result.case) for result in flat}))
    handles = [handle(look, linestyle=look.line, markersize=5) for look in style.values()]
    left_out = f"{len(every) - len(shown)} more groups of sizes are not shown." if len(every) > len(shown) else ""
    text = caption(flat, f"All: {shared_case(flat, leave_out=('q_len', 'kv_len'))}. {_BARS}", left_out)
    return finish(figure, name, title, text, handles, list(style))


def _marks(panel: Any, look: "Look", x: Sequence[float], y: Sequence[float], **options: Any) -> None:
    """Draw a pass of a backend; `options` are its error bars, its label, and another line than the look's."""
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    if x:
        kept = {"color": look.colour, "marker": look.marker, "linestyle": look.line, "markersize": 5}
        panel.errorbar(x, y, **kept | {"linewidth": 1.4, "elinewidth": 1, "capsize": 2} | options)


def _rates(
    together: "Sequence[Result]", label: str, side: str, metric: str
) -> "tuple[list[Result], list[float], tuple[list[float], list[float]]]":
    """Return the results of a backend by length with the metric in a pass, and their error bars."""
    own = [result for result in together if result.label == label and f"{side}/{metric}" in result.metrics]
    own.sort(key=lambda result: length(result.case))
    rates = [result.metrics[f"{side}/{metric}"] for result in own]
    return own, rates, _bars(own, side, rates)


def _bars(own: "Sequence[Result]", side: str, rates: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return each rate's error bars, zero where the time has no interval."""
    down, up = [], []
    for result, rate in zip(own, rates, strict=True):
        middle, low, high = (result.metrics.get(f"{side}/time{end}_us") for end in ("", "_low", "_high"))
        if middle and low and high:
            down.append(max(0.0, rate * (1 - middle / high)))
            up.append(max(0.0, rate * (middle / low - 1)))
        else:
            down.append(0.0)
            up.append(0.0)
    return down, up


def _ticks(panels: Sequence[Any], lengths: Sequence[int]) -> None:
    """Set a tick at each measured length, or at some of them if there are many."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    # From the longest down, because that is the one of most interest.
    apart = (lengths[-1] / lengths[0]) ** (1 / _MOST_TICKS)
    kept = [lengths[-1]]
    for one in reversed(lengths[:-1]):
        if kept[-1] >= one * apart:
            kept.append(one)
    for panel in panels:
        panel.xaxis.set_major_locator(FixedLocator(kept[::-1]))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(round(value))))
        panel.xaxis.set_minor_locator(NullLocator())
