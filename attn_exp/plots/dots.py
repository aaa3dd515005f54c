"""Accuracy over speed: a dot per job, coloured by backend."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_exp.plots.data import caption, measured, shared_case
from attn_exp.plots.style import Chart, finish, handle, log_ticks, looks, new_figure

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_RASTERISED_FROM = 1500
# The tensors by which a pass is judged; the chart shows the largest error.
_ERRORS = {"forward": ("error_out",), "backward": ("error_dq", "error_dk", "error_dv")}
_ERRORS["step"] = _ERRORS["forward"] + _ERRORS["backward"]


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
        figure, "accuracy", "Accuracy against speed", text, [handle(look) for look in style.values()], list(style)
    )


def _error(result: "Result", side: str) -> float | None:
    error = [value for name in _ERRORS[side] if (value := result.metrics.get(f"{side}/{name}"))]
    return max(error, default=None)
