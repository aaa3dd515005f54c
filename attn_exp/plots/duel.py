"""Chart of a duel: the ratios of its rounds. Nothing is drawn if matplotlib is not installed."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_exp.core.files import write_whole
from attn_exp.core.metrics import ranking_medians
from attn_exp.core.paired_test import PairedComparison
from attn_exp.core.record import Record
from attn_exp.plots.style import png

# Okabe and Ito's colours, suitable for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LONGEST_LEGEND = 7


def plot_ratios(records: Sequence[Record], verdicts: dict[str, list[PairedComparison]], path: Path) -> Path | None:
    """Plot a duel's ratios by round, a panel per pass, with 95 % interval and margin; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    figure, panels = _figure(len(verdicts))
    for panel, (direction, comparisons) in zip(panels, verdicts.items(), strict=True):
        for colour, comparison in zip(COLOURS, comparisons[:_LONGEST_LEGEND], strict=False):
            first, second = records[comparison.a], records[comparison.b]
            ratios = [
                100 * (two / one - 1)
                for one, two in zip(ranking_medians(first, direction), ranking_medians(second, direction), strict=True)
            ]
            label = f"{second.request.label} against {first.request.label}: {100 * comparison.effect:+.1f} %"
            panel.plot(range(1, len(ratios) + 1), ratios, "o-", color=colour, label=label, markersize=4, linewidth=1)
            panel.axhspan(100 * comparison.low, 100 * comparison.high, color=colour, alpha=0.2)
        margin = 100 * comparisons[0].margin
        panel.axhspan(-margin, margin, color="grey", alpha=0.12, label=f"+-{margin:.1f} %: no difference here")
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.set(title=direction, xlabel="round", ylabel="time against the other, %")
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.suptitle(f"{records[0].device_name}, {records[0].request.case.label()}", fontsize=10)
    write_whole(path, png(figure, dpi=110))
    return path


def _figure(panels: int) -> tuple[Any, list[Any]]:
    """Return a figure with adjacent panels, without pyplot: no window system, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * panels, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])
