"""Heatmap of speed-ups: a row per case, a column per backend, a panel per pass, on a log colour scale."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attn_exp.comparison.join import method_key
from attn_exp.core.case.case import PASSES
from attn_exp.core.record.status import STATUSES
from attn_exp.plots.data import caption, case_names, shared_case
from attn_exp.plots.style import SMALL, Chart, finish, new_figure

if TYPE_CHECKING:
    from attn_exp.comparison.ranking import Ranking
    from attn_exp.comparison.rivals import Rivals

_MOST_ROWS, _MOST_COLUMNS = 120, 14
# The height of the colour scale, at most.
_BAR_INCHES = 3.0
# The colour scale ends at this ratio, so that one slow backend does not make all others pale.
_FULL = 4.0


def heatmap_chart(rivals: "Rivals") -> Chart | None:
    """Draw how many times better each backend is than the baseline or the best; None with fewer than two."""
    rows = [row for row in rivals.rows if row.gain is not None or row.cell.value is None]
    # The means are in order, the best first.
    labels = sorted([*dict.fromkeys(mean.label for mean in rivals.means)][:_MOST_COLUMNS])
    rows = [row for row in rows if row.cell.result.label in labels]
    valued = {row.cell.result.label for row in rows if row.gain is not None}
    if len(labels) < 2 or not valued or len(valued) < 2:
        return None
    results = list({id(row.cell.result): row.cell.result for row in rows}.values())
    name_of = case_names(results)
    passes = [side for side in PASSES if any(row.cell.direction == side for row in rows)]
    by_pass = [_grid([row for row in rows if row.cell.direction == side]) for side in passes]
    # A case has the same row in both panels.
    cases = list(dict.fromkeys(key for grid in by_pass for key in grid))
    shown = cases[:_MOST_ROWS]
    texts = {key: name_of(next(iter(grid[key].values())).cell.result) for grid in by_pass for key in grid}
    widest = max(len(texts[key]) for key in shown)
    width = 1.4 + 0.085 * widest + len(passes) * max(2.0, 0.62 * len(labels))
    figure = new_figure(max(width, 6.0), 1.9 + 0.26 * len(shown) + 0.055 * max(map(len, labels)))
    panels = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    image: Any = None
    for panel, side, grid in zip(panels, passes, by_pass, strict=True):
        image = _draw(panel, [grid.get(key, {}) for key in shown], labels)
        panel.set_title(side, fontsize=10)
        # Above the cells: below, they would be out of sight of most of many rows.
        panel.xaxis.tick_top()
        panel.set_xticks(range(len(labels)), labels, rotation=45, ha="left", rotation_mode="anchor", fontsize=SMALL)
    panels[0].set_yticks(range(len(shown)), [texts[key] for key in shown], fontsize=SMALL)
    title = f"Speed-up over {rivals.baseline}" if rivals.baseline else "Speed relative to the best"
    tall = min(_BAR_INCHES, 0.24 * len(shown))
    bar = figure.colorbar(image, ax=list(panels), shrink=tall / (0.26 * len(shown)), anchor=(0.0, 1.0), pad=0.01,
                          aspect=tall / 0.15)  # fmt: skip
    bar.ax.set_yticks([math.log2(x) for x in (0.25, 0.5, 1, 2, 4)], ["1/4", "1/2", "1", "2", "4"])
    bar.ax.minorticks_off()
    if not rivals.baseline:
        bar.ax.set_ylim(-math.log2(_FULL), 0.0)
    bar.set_label(f"times as good as {rivals.baseline or 'the best'}", fontsize=SMALL)
    left_out = len(cases) - len(shown)
    what = "median times" if rivals.metric.name == "time_us" else str(rivals.metric)
    text = caption(
        results,
        f"Ratios of {what}: more is better. Bold: the best, and backends too close to it to call.",
        f"All: {shared_case(results)}.",
        f"{left_out} more cases are among the rows only." if left_out else "",
    )
    return finish(figure, "heatmap", title, text)


def _grid(rows: "Sequence[Ranking]") -> "dict[Any, dict[str, Ranking]]":
    """Return the rows by case and way of measuring, then by backend."""
    by_case: dict[Any, dict[str, Ranking]] = {}
    for row in rows:
        result = row.cell.result
        key = (result.case, result.model, method_key(result), result.device_name)
        if row.cell.value is None:
            # A failed job has no device: it belongs to its case.
            key = next((other for other in by_case if other[:3] == key[:3]), key)
        by_case.setdefault(key, {})[result.label] = row
    return by_case


def _draw(panel: Any, rows: "Sequence[dict[str, Ranking]]", labels: Sequence[str]) -> Any:
    shades = [
        [math.log2(one.gain.value) if (one := row.get(label)) and one.gain else math.nan for label in labels]
        for row in rows
    ]
    panel.set_facecolor("#eeeeee")
    limit = math.log2(_FULL)
    image = panel.imshow(shades, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
    for y, row in enumerate(rows):
        for x, label in enumerate(labels):
            one = row.get(label)
            text, dark = _text(one), abs(shades[y][x]) > 0.72 * limit
            weight = "bold" if one is not None and one.best and one.gain else "normal"
            panel.text(x, y, text, ha="center", va="center", fontsize=SMALL, fontweight=weight,
                       color="white" if dark else "black")  # fmt: skip
    panel.tick_params(length=0)
    # Two collections; a grid of minor ticks would make each line an object of several others.
    wide, tall = len(labels), len(rows)
    panel.vlines([x - 0.5 for x in range(1, wide)], -0.5, tall - 0.5, color="white", linewidth=1)
    panel.hlines([y - 0.5 for y in range(1, tall)], -0.5, wide - 0.5, color="white", linewidth=1)
    panel.set(xlim=(-0.5, wide - 0.5), ylim=(tall - 0.5, -0.5))
    return image


def _text(one: "Ranking | None") -> str:
    if one is None:
        return ""
    if one.gain is None:
        status = one.cell.result.status
        return STATUSES[status].short or status
    value = one.gain.value
    return f"{value:.1g}" if value < 0.01 else f"{value:.2f}" if value < 10 else f"{value:.0f}"
