"""Dot charts: first-call times, and accuracy over speed; a dot per job, coloured by backend."""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from attn_exp.plots.data import caption, measured, passes_of, shared_case
from attn_exp.plots.style import SMALL, Chart, finish, log_ticks, looks, new_figure

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_RASTERISED_FROM = 1500
# The tensors by which a pass is judged; the chart shows the largest error.
_ERRORS = {"forward": ("error_out",), "backward": ("error_dq", "error_dk", "error_dv")}
_ERRORS["step"] = _ERRORS["forward"] + _ERRORS["backward"]


def first_call_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw the seconds of each job's first call, a row per backend; None if none was timed."""
    timed = measured(results, "first_call_s")
    if not timed:
        return None
    passes, style = passes_of(timed, "first_call_s"), looks(timed)
    figure = new_figure(2.2 + 3.8 * len(passes), 2.0 + 0.52 * len(style))
    panels = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    for panel, side in zip(panels, passes, strict=True):
        for row, (label, look) in enumerate(style.items()):
            own = [
                r.metrics[f"{side}/first_call_s"]
                for r in timed
                if r.label == label
                if r.metrics.get(f"{side}/first_call_s")
            ]
            if not own:
                continue
            spread = [row + 0.4 * ((index * 0.618) % 1 - 0.5) for index in range(len(own))]
            panel.plot(own, spread, look.marker, color=look.colour, markersize=5, alpha=0.55, markeredgewidth=0,
                       rasterized=len(timed) > _RASTERISED_FROM)  # fmt: skip
            panel.plot([median(own)] * 2, [row - 0.26, row + 0.26], color="#222222", linewidth=1.6)
            panel.annotate(_seconds(median(own)), (median(own), row - 0.26), xytext=(0, 1), textcoords="offset points",
                           ha="center", va="bottom", fontsize=SMALL)  # fmt: skip
        panel.set(title=side, xscale="log", xlabel="first call, s")
        panel.title.set_fontsize(10)
        panel.set_ylim(len(style) - 0.6, -0.75)
        log_ticks(panel.xaxis)
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(style)), list(style), fontsize=SMALL)
    text = caption(
        timed,
        "The first call of each job: building, compiling, loading. A dot per job; the line is the median.",
        "What every attention call loads is loaded before and not included.",
    )
    return finish(figure, "first_call", "First-call cost", text)


def accuracy_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw each job's error over its rate; None if none was judged."""
    judged = [r for r in measured(results, "tflops") if any(_error(r, side) for side in _ERRORS)]
    if not judged:
        return None
    passes, style = [side for side in _ERRORS if any(_error(r, side) for r in judged)], looks(judged)
    figure = new_figure(1.2 + 4.2 * len(passes), 4.6)
    panels = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    for panel, side in zip(panels, passes, strict=True):
        for label, look in style.items():
            own = [r for r in judged if r.label == label and _error(r, side) and r.metrics.get(f"{side}/tflops")]
            panel.plot([r.metrics[f"{side}/tflops"] for r in own], [_error(r, side) for r in own], look.marker,
                       color=look.colour, markersize=6, alpha=0.7, markeredgewidth=0, label=label,
                       rasterized=len(judged) > _RASTERISED_FROM)  # fmt: skip
        panel.set(title=side, xscale="log", yscale="log", xlabel="TFLOPS")
        panel.title.set_fontsize(10)
        log_ticks(panel.xaxis)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    errors = [error for r in judged for side in passes if (error := _error(r, side))]
    panels[0].set_ylim(min(errors) / 1.5, max(errors) * 1.5)
    log_ticks(panels[0].yaxis)
    panels[0].set_ylabel("relative error against float32")
    text = caption(
        judged,
        "Lower is more accurate, further right is faster. Error: norm of the difference over the reference's norm,",
        "the largest of dq, dk and dv.",
        f"All: {shared_case(judged)}.",
    )
    return finish(
        figure, "accuracy", "Accuracy against speed", text, [_handle(look) for look in style.values()], list(style)
    )


def _error(result: "Result", side: str) -> float | None:
    error = [value for name in _ERRORS[side] if (value := result.metrics.get(f"{side}/{name}"))]
    return max(error, default=None)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _handle(look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=look.colour, marker=look.marker, linestyle="none", markersize=6)
