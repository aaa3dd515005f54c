"""Chart of changes: how much each cell differs from the earlier sweep, with its interval."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_exp.core.stats.summary import quantile
from attn_exp.core.text import SHORT
from attn_exp.plots.data import caption, case_names, shared_case
from attn_exp.plots.style import SMALL, Chart, finish, looks, new_figure

if TYPE_CHECKING:
    from attn_exp.compare.changes import Changes

_MOST_ROWS = 40
# The axis ends at so many times the third quartile, so that one change does not flatten the others.
_REACH = 4.0


def changes_chart(changes: "Changes") -> Chart | None:
    """Draw the cells with two values, at most 40, the largest changes first; None if there are none."""
    # In the order of the table, which puts urgent rows first.
    every = [row for row in changes.rows if row.change is not None and row.low is not None and row.high is not None]
    if not every:
        return None
    rows = sorted(every, key=lambda row: -abs(row.change or 0.0))[:_MOST_ROWS]
    results = list({id(row.cell.result): row.cell.result for row in rows}.values())
    style, name_of = looks(results), case_names(results)
    figure = new_figure(8.5, 2.1 + 0.22 * len(rows))
    panel = figure.subplots()
    edge = _edge([max(abs(row.low or 0.0), abs(row.high or 0.0)) for row in rows])
    for at, row in enumerate(rows):
        assert row.change is not None and row.low is not None and row.high is not None
        look = style[row.cell.result.label]
        fill = "full" if row.verdict in ("slower", "faster") else "none"
        low, middle, high = (max(-edge, min(edge, one)) for one in (row.low, row.change, row.high))
        panel.plot([100 * low, 100 * high], [at, at], color=look.colour, linewidth=1.4)
        panel.plot(100 * middle, at, look.marker, color=look.colour, fillstyle=fill, markersize=5)
        if abs(row.change) > edge:
            side = "right" if row.change > 0 else "left"
            panel.annotate(f"{100 * row.change:+.0f} %", (100 * middle, at), xytext=(-8 if row.change > 0 else 8, 0),
                           textcoords="offset points", ha=side, va="center", fontsize=SMALL)  # fmt: skip
    panel.axvline(0, color="#777777", linewidth=0.8)
    panel.axvspan(-100 * changes.margin, 100 * changes.margin, color="#000000", alpha=0.06, linewidth=0)
    names = [
        " ".join(filter(None, [row.cell.result.label, SHORT[row.cell.direction], name_of(row.cell.result)]))
        for row in rows
    ]
    panel.set_yticks(range(len(rows)), names, fontsize=SMALL)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_xlabel(f"change of {changes.metric}, %, corrected for sessions where canaries allow")
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    beyond = sum(abs(row.change or 0.0) > edge for row in rows)
    left_out = len(every) - len(rows)
    text = caption(
        results,
        "Filled: faster or slower; lines: 95 % intervals; the grey band is the margin.",
        f"Beyond {100 * edge:.0f} % they are drawn at the edge, with their number." if beyond else "",
        f"All: {shared_case(results)}.",
        f"{left_out} cells with smaller changes are not shown." if left_out else "",
    )
    new, old = (
        ", ".join(one.name for one in part) for part in (changes.sweeps[changes.old :], changes.sweeps[: changes.old])
    )
    return finish(figure, "changes", f"{new} against {old}", text)


def _edge(reaches: Sequence[float]) -> float:
    """Return where the axis ends: at the farthest interval, or nearer if only few reach as far."""
    return min(max(reaches), _REACH * quantile(sorted(reaches), 0.75))
