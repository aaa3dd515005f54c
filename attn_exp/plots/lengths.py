"""A rate (TFLOPS, GB/s) over sequence length: a curve per backend, a column per pass, a row for each other size.

GB/s are drawn over the cases if they differ in more than that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_exp.plots.data import caption, case_names, families, length, measured, passes_of, shared_case, size_text
from attn_exp.plots.style import SMALL, Chart, finish, handle, log_ticks, looks, new_figure
from attn_exp.results.table import table_order

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_MOST_ROWS = 8
_MOST_TICKS = 9
_MOST_CASES = 60


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
    at = {name: place for place, name in enumerate(names[:_MOST_CASES])}
    every = [[one for one in several if name_of(one) in at]] if len(at) > 1 else []
    left_out = f"{len(names) - len(at)} more cases are not shown." if len(names) > len(at) else ""
    return _chart(every, "gb_per_s", "GB/s", "bandwidth", title, list(at), lambda one: at[name_of(one)], left_out)


def _chart(
    every: "list[list[Result]]",
    metric: str,
    unit: str,
    name: str,
    title: str,
    cases: Sequence[str] = (),
    place: "Callable[[Result], float]" = lambda result: length(result.case),
    left_out: str = "",
) -> Chart | None:
    """Draw a row of panels for each list of results, over length or, if `cases` are named, each at its `place`."""
    if not every:
        return None
    shown = every[:_MOST_ROWS]
    if len(every) > len(shown):
        left_out = f"{len(every) - len(shown)} more groups of sizes are not shown."
    flat = [result for one in shown for result in one]
    passes = passes_of(flat, metric)
    style = looks(flat)
    if cases:
        # No line joins cases that have no order.
        style = {label: replace(look, line="none") for label, look in style.items()}
    name_of = case_names([one[0] for one in shown], leave_out=("q_len", "kv_len"))
    figure = new_figure(1.2 + max(4.4, 0.25 * len(cases)) * len(passes), 1.9 + (3.0 if cases else 1.8) * len(shown))
    panels = figure.subplots(len(shown), len(passes), squeeze=False, sharex=True, sharey="row")
    for row, together in zip(panels, shown, strict=True):
        for panel, side in zip(row, passes, strict=True):
            _draw(panel, together, side, style, metric, place, 0.7 / len(style) if cases else 0.0)
        # Rates over lengths span decades.
        row[0].set_yscale("log")
        log_ticks(row[0].yaxis)
        row[0].set_ylabel(f"{name_of(together[0])}\n{unit}".lstrip())
    for panel, side in zip(panels[0], passes, strict=True):
        panel.set_title(side, fontsize=10)
    for panel in panels[-1]:
        if cases:
            panel.set_xticks(range(len(cases)), cases, rotation=45, ha="right", rotation_mode="anchor", fontsize=SMALL)
        else:
            panel.set_xscale("log", base=2)
            panel.set_xlabel("sequence length, tokens")
    if not cases:
        _ticks(panels[-1], sorted({length(result.case) for result in flat}))
    handles = [handle(look, linestyle=look.line, markersize=5) for look in style.values()]
    text = caption(
        flat,
        f"All: {shared_case(flat, leave_out=() if cases else ('q_len', 'kv_len'))}. "
        "Bars: 95 % confidence intervals across rounds.",
        left_out,
    )
    return finish(figure, name, title, text, handles, list(style))


def _draw(
    panel: Any,
    together: "Sequence[Result]",
    side: str,
    style: dict[str, Any],
    metric: str,
    place: "Callable[[Result], float]",
    apart: float,
) -> None:
    """Draw a pass of each backend, `apart` by which the backends are beside each other."""
    for index, (label, look) in enumerate(style.items()):
        own = sorted((r for r in together if r.label == label and f"{side}/{metric}" in r.metrics), key=place)
        if not own:
            continue
        rates = [result.metrics[f"{side}/{metric}"] for result in own]
        down, up = _bars(own, side, rates)
        panel.errorbar(
            [place(result) + apart * (index - (len(style) - 1) / 2) for result in own],
            rates,
            yerr=(down, up),
            color=look.colour,
            marker=look.marker,
            linestyle=look.line,
            markersize=5,
            linewidth=1.4,
            elinewidth=1,
            capsize=2,
            label=label,
        )
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)


def _bars(own: "Sequence[Result]", side: str, rates: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return each rate's error bars, zero where the time has no interval."""
    down, up = [], []
    for result, rate in zip(own, rates, strict=True):
        middle, low, high = (result.metrics.get(f"{side}/time{end}_us") for end in ("", "_low", "_high"))
        known = middle and low and high
        down.append(max(0.0, rate * (1 - middle / high)) if known and middle and high else 0.0)
        up.append(max(0.0, rate * (middle / low - 1)) if known and middle and low else 0.0)
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
