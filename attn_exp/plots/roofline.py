"""Charts with a dot per job: the roofline, and accuracy over speed.

The roofline has rates over arithmetic intensity, below this machine's measured ceilings and the datasheet's.
"""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from attn_exp.core.case.case import TYPED_DTYPES
from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.plots.data import caption, measured, passes_of, shared_case
from attn_exp.plots.style import Chart, Look, finish, handle, log_ticks, looks, new_figure

if TYPE_CHECKING:
    from attn_exp.results.result import Result

# With more points than this, paths make the file slow in browsers.
_RASTERISED_FROM = 1500
_FILL = {"forward": "full", "backward": "none", "step": "left"}


def roofline_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw each pass as a point, forward filled, backward hollow, a step half; None if no rate or bytes are known."""
    drawn = measured(results, "tflops", "min_bytes")
    if not drawn:
        return None
    device, dtype = drawn[-1].device_name, drawn[-1].case.dtype
    # One roof per chart: other devices and data types have other roofs.
    drawn = [result for result in drawn if (result.device_name, result.case.dtype) == (device, dtype)]
    passes, style = passes_of(drawn, "min_bytes"), looks(drawn)
    figure = new_figure(8.0, 5.6)
    panel = figure.subplots()
    intensities: list[float] = []
    for side in passes:
        for label, look in style.items():
            points = [_point(result, side) for result in drawn if result.label == label]
            kept = [point for point in points if point]
            intensities += [x for x, _ in kept]
            panel.plot(
                [x for x, _ in kept],
                [y for _, y in kept],
                linestyle="none",
                marker=look.marker,
                color=look.colour,
                fillstyle=_FILL[side],
                markersize=6,
                alpha=0.85,
                label=label if side == passes[0] else f"{label}, {side}",
                rasterized=len(drawn) > _RASTERISED_FROM,
            )
    panel.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per compulsory byte", ylabel="TFLOPS")
    roofs = _roofs(drawn, device, dtype)
    _draw_roofs(panel, roofs, min(intensities), max(intensities))
    panel.grid(which="both", color="#e6e6e6", linewidth=0.5)
    panel.set_axisbelow(True)
    log_ticks(panel.xaxis)
    log_ticks(panel.yaxis)
    handles = [handle(look) for look in style.values()]
    labels = list(style)
    if len(passes) > 1:
        handles += [handle(Look("#777777", "o"), fillstyle=_FILL[side]) for side in passes]
        labels += passes
    handles += [handle(Look("#444444", ""), linestyle=line, linewidth=1.3) for _, _, _, line in roofs]
    labels += [f"{name}: {rate:.4g} TFLOPS, {speed:.3g} TB/s" for name, rate, speed, _ in roofs]
    measured_too = any(name == "measured" for name, *_ in roofs)
    others = len({(r.device_name, r.case.dtype) for r in measured(results, "tflops", "min_bytes")}) - 1
    text = caption(
        drawn,
        "Bytes are the compulsory ones, FLOP those of unmasked pairs.",
        "Measured: a large matrix product and a copy, in the worker that ran the jobs." if measured_too else "",
        f"All: {shared_case(drawn)}.",
        f"{others} more devices or data types are not shown." if others else "",
    )
    return finish(figure, "roofline", f"Roofline, {device}, {TYPED_DTYPES.get(dtype, dtype)}", text, handles, labels)


def _point(result: "Result", side: str) -> tuple[float, float] | None:
    rate, moved, us = (result.metrics.get(f"{side}/{name}") for name in ("tflops", "min_bytes", "time_us"))
    if not rate or not moved or not us:
        return None
    return rate * us * 1e6 / moved, rate


def _roofs(results: "Sequence[Result]", device: str, dtype: str) -> list[tuple[str, float, float, str]]:
    """Return each roof's name, TFLOPS, TB/s and line style."""
    roofs = []
    products = [r.ceilings["matmul_flops_per_s"] for r in results if r.ceilings.get("matmul_flops_per_s")]
    copies = [r.ceilings["copy_bytes_per_s"] for r in results if r.ceilings.get("copy_bytes_per_s")]
    if products and copies:
        roofs.append(("measured", median(products) / 1e12, median(copies) / 1e12, "-"))
    peak = datasheet_peak(device)
    if peak is not None and dtype in peak.flops:
        roofs.append(("datasheet", peak.flops[dtype] / 1e12, peak.bytes_per_s / 1e12, ":"))
    return roofs


def _draw_roofs(panel: Any, roofs: Sequence[tuple[str, float, float, str]], least: float, most: float) -> None:
    if not roofs:
        return
    ridges = [rate / speed for _, rate, speed, _ in roofs]
    left, right = min([least, *ridges]) / 2, max([most, *ridges]) * 2
    for _, rate, speed, line in roofs:
        ridge = rate / speed
        panel.plot([left, ridge, right], [left * speed, rate, rate], color="#444444", linestyle=line, linewidth=1.3)
    panel.set_xlim(left, right)
    low, high = panel.get_ylim()
    panel.set_ylim(low, max(high, max(rate for _, rate, _, _ in roofs) * 1.6))


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
