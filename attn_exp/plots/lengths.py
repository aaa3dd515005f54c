"""A rate (TFLOPS, GB/s) over sequence length: a curve per backend, a column per pass, a row for each other size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attn_exp.plots.data import caption, case_names, families, length, measured, passes_of, shared_case, size_text
from attn_exp.plots.style import Chart, finish, handle, log_ticks, looks, new_figure

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_MOST_ROWS = 8
_MOST_TICKS = 9


def lengths_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw the families that have several lengths, at most eight with the most; None if there are none."""
    return _chart(results, "tflops", "TFLOPS", "lengths", "TFLOPS against sequence length")


def bandwidth_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw the same of the rate of compulsory bytes in GB/s, as PyTorch's kernel-benchmark utilities plot it."""
    return _chart(results, "gb_per_s", "GB/s", "bandwidth", "GB/s of compulsory bytes against sequence length")


def _chart(results: "Sequence[Result]", metric: str, unit: str, name: str, title: str) -> Chart | None:
    every = families(measured(results, metric))
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
            _draw(panel, together, side, style, metric)
        # Rates over lengths span decades.
        row[0].set_yscale("log")
        log_ticks(row[0].yaxis)
        row[0].set_ylabel(f"{name_of(together[0])}\n{unit}".lstrip())
    for panel, side in zip(panels[0], passes, strict=True):
        panel.set_title(side, fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("sequence length, tokens")
    _ticks(panels[-1], sorted({length(result.case) for result in flat}))
    handles = [handle(look, linestyle=look.line, markersize=5) for look in style.values()]
    left_out = len(every) - len(shown)
    text = caption(
        flat,
        f"All: {shared_case(flat, leave_out=('q_len', 'kv_len'))}. Bars: 95 % confidence intervals across rounds.",
        f"{left_out} more groups of sizes are not shown." if left_out else "",
    )
    return finish(figure, name, title, text, handles, list(style))


def _draw(panel: Any, together: "Sequence[Result]", side: str, style: dict[str, Any], metric: str) -> None:
    for label, look in style.items():
        own = sorted(
            (r for r in together if r.label == label and f"{side}/{metric}" in r.metrics), key=lambda r: length(r.case)
        )
        if not own:
            continue
        lengths, rates = [length(result.case) for result in own], [result.metrics[f"{side}/{metric}"] for result in own]
        down, up = _bars(own, side, rates)
        panel.errorbar(
            lengths,
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
    panel.set_xscale("log", base=2)
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
