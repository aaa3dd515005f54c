"""Error against speed of the dtypes of a sweep, with the Pareto front: what no other way beats in both."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attn_exp.core.case import TYPED_DTYPES
from attn_exp.core.case_fields import case_columns
from attn_exp.plots.data import caption, case_names, measured, shared_case
from attn_exp.plots.style import SMALL, Chart, finish, log_ticks, looks, new_figure

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_RATE, _ERROR = "forward/tflops", "forward/error_out"
_MOST_ROWS = 4
# Colours of dtypes that are told apart in every common colour blindness (Okabe and Ito); fp32 and others are grey.
_COLOURS = {"bf16": "#0072B2", "fp16": "#56B4E9", "fp8": "#D55E00", "int8": "#009E73"}
_OTHER = "#666666"


def precision_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw each forward's error over its rate, a row per case and a column per kind of inputs.

    Cases that differ only in their dtype share a row, at most four with the most dtypes; None if none has several.
    """
    by_case: dict[Any, list[Result]] = defaultdict(list)
    for result in measured(results, "tflops", "error_out"):
        if result.metrics.get(_RATE) and result.metrics.get(_ERROR):
            by_case[_but_for_dtype(result)].append(result)
    several = [one for one in by_case.values() if len({result.case.dtype for result in one}) > 1]
    if not several:
        return None
    rows = sorted(several, key=lambda one: -len({result.case.dtype for result in one}))[:_MOST_ROWS]
    shown = [result for row in rows for result in row]
    kinds = list(dict.fromkeys(result.measuring.inputs for result in shown))
    name_of = case_names([row[0] for row in rows], leave_out=("dtype",))
    figure = new_figure(1.4 + 4.4 * len(kinds), 1.4 + 3.4 * len(rows))
    panels = figure.subplots(len(rows), len(kinds), squeeze=False, sharex="row", sharey=True)
    style = looks(shown)
    for together, line in zip(rows, panels, strict=True):
        for kind, panel in zip(kinds, line, strict=True):
            _draw(panel, [result for result in together if result.measuring.inputs == kind], style)
            panel.set(xscale="log", yscale="log")
            panel.grid(color="#dddddd", linewidth=0.6)
            panel.set_axisbelow(True)
        log_ticks(line[0].xaxis)
        line[0].set_ylabel(f"{name_of(together[0])}\nrelative error of out".strip())
    log_ticks(panels[0][0].yaxis)
    for kind, panel in zip(kinds, panels[0], strict=True):
        panel.set_title(f"inputs={kind}", fontsize=10)
    for panel in panels[-1]:
        panel.set_xlabel("forward, TFLOPS")
    left_out = len(several) - len(rows)
    text = caption(
        shown,
        "Lower is more accurate, further right is faster; the line is the Pareto front of a panel: nothing is both",
        "faster and more accurate than what is on it. int8 is quantised inside of the call: its cost is in time and",
        "error. fp8 inputs are codes: what rounding them cost before the call is in neither.",
        f"All: {shared_case(shown, leave_out=('dtype',))}.",
        f"{left_out} more cases are not shown." if left_out else "",
    )
    typed = list(dict.fromkeys(TYPED_DTYPES.get(result.case.dtype, result.case.dtype) for result in shown))
    handles = [_handle(_COLOURS.get(name, _OTHER), "o") for name in typed]
    handles += [_handle("#222222", look.marker) for look in style.values()]
    return finish(figure, "precision", "Precision against speed", text, handles, [*typed, *style])


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (rate, error) that no other one beats in one and equals in the other, by falling rate."""
    front: list[tuple[float, float]] = []
    for rate, error in sorted(set(points), key=lambda point: (-point[0], point[1])):
        if not front or error < front[-1][1]:
            front.append((rate, error))
    return front


def _but_for_dtype(result: "Result") -> tuple[Any, ...]:
    sizes = tuple(getattr(result.case, name) for name in case_columns() if name != "dtype")
    way = result.measuring
    return *sizes, result.model, result.device_name, way.timer, way.regime, result.l2


def _draw(panel: Any, own: "Sequence[Result]", style: dict[str, Any]) -> None:
    points = [(result.metrics[_RATE], result.metrics[_ERROR]) for result in own]
    front = pareto_front(points)
    # From a point leftwards everything slower has its error, until a more accurate one begins.
    panel.plot([rate for rate, _ in front], [error for _, error in front], color="#222222", linewidth=1.2,
               drawstyle="steps-post", zorder=1)  # fmt: skip
    for result, point in zip(own, points, strict=True):
        typed = TYPED_DTYPES.get(result.case.dtype, result.case.dtype)
        panel.plot([point[0]], [point[1]], style[result.label].marker, color=_COLOURS.get(typed, _OTHER), markersize=7,
                   markeredgewidth=0, label=f"{result.label} {typed}")  # fmt: skip
        if point in front:
            panel.annotate(f"{result.label} {typed}", point, xytext=(0, 6), textcoords="offset points", ha="center",
                           fontsize=SMALL)  # fmt: skip


def _handle(colour: str, marker: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=6)
