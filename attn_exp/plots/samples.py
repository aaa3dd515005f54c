"""Charts of single timings: the samples of some jobs in chronological order, and the ratios of a duel's rounds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from attn_exp.core.errors import RecordError
from attn_exp.core.files import write_whole
from attn_exp.core.record.metrics import ranking_medians
from attn_exp.core.record.record import Record
from attn_exp.core.stats.paired import PairedComparison
from attn_exp.core.stats.summary import quantile
from attn_exp.plots.data import caption, case_names, measured, passes_of, shared_case
from attn_exp.plots.style import SMALL, Chart, available, finish, looks, new_figure, png

if TYPE_CHECKING:
    from attn_exp.results.result import Result

_MOST_JOBS = 16
# Samples further than this from the median (per cent) are drawn at the edge, so that one does not set the scale.
_WIDEST = 40.0
_FEWEST, _FEW = 5, 60
# Okabe and Ito's colours, suitable for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LONGEST_LEGEND = 7


def samples_chart(results: "Sequence[Result]") -> Chart | None:
    """Draw the jobs with the longest times, at most 16; None if no samples are stored."""
    sampled = measured(results, "time_us")
    longest = sorted(sampled, key=lambda result: -result.metrics.get("forward/time_us", 0.0))[:_MOST_JOBS]
    # Backends of one case adjacent.
    chosen = sorted(longest, key=lambda one: (-one.case.batch * one.case.q_len, repr(one.case), one.label))
    records = [(result, record) for result in chosen if (record := _record(result)) is not None]
    if not records:
        return None
    kept = [result for result, _ in records]
    passes, style, name_of = passes_of(kept, "time_us"), looks(kept), case_names(kept)
    names = [f"{result.label}  {name_of(result)}".rstrip() for result in kept]
    figure = new_figure(0.5 + 0.08 * max(map(len, names)) + 3.6 * len(passes), 1.9 + 0.32 * len(records))
    panels = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    for panel, side in zip(panels, passes, strict=True):
        reach = 1.0
        for row, (result, record) in enumerate(records):
            reach = max(reach, _row(panel, row, record, side, style[result.label].colour))
        panel.axvline(0, color="#999999", linewidth=0.8)
        panel.set_xlim(-1.08 * min(reach, _WIDEST), 1.08 * min(reach, _WIDEST))
        panel.set_title(side, fontsize=10)
        panel.set_xlabel("sample over the job's median, %")
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(names)), names, fontsize=SMALL)
    panels[0].invert_yaxis()
    left_out = len(sampled) - len(kept)
    text = caption(
        kept,
        "A dot per sample, the first at the top of each row; bars span the 5th to the 95th percentile.",
        f"Samples beyond {_WIDEST:.0f} % are drawn at the edge.",
        f"All: {shared_case(kept)}.",
        f"Of {left_out + len(kept)} jobs, those with the longest times are shown." if left_out else "",
    )
    return finish(figure, "samples", "Samples of each job", text)


def _record(result: "Result") -> Record | None:
    try:
        record = result.record()
    except (RecordError, OSError):
        return None
    enough = any(one.timings and len(one.timings[0].times_us) >= _FEWEST for one in record.passes.values())
    return record if enough else None


def _row(panel: Any, row: int, record: Record, side: str, colour: str) -> float:
    """Draw one job's samples and return the range that contains nearly all of them, in per cent of the median."""
    measured_pass = record.passes.get(side)
    if measured_pass is None or not measured_pass.timings or len(measured_pass.timings[0].times_us) < _FEWEST:
        return 0.0
    times = measured_pass.timings[0].times_us
    middle = median(times)
    off = [100 * (time / middle - 1) for time in times]
    edged = [max(-_WIDEST, min(_WIDEST, one)) for one in off]
    heights = [row - 0.34 + 0.68 * index / (len(off) - 1) for index in range(len(off))]
    panel.plot(edged, heights, ".", color=colour, markersize=5 if len(off) < _FEW else 3, alpha=0.6, markeredgewidth=0,
               zorder=3, rasterized=True)  # fmt: skip
    low, high = quantile(sorted(off), 0.05), quantile(sorted(off), 0.95)
    panel.plot([low, high], [row, row], color="#bbbbbb", linewidth=5, solid_capstyle="butt")
    return max(abs(quantile(sorted(off), 0.01)), abs(quantile(sorted(off), 0.99)))


def plot_ratios(records: Sequence[Record], verdicts: dict[str, list[PairedComparison]], path: Path) -> Path | None:
    """Plot a duel's ratios by round, a panel per pass, with 95 % interval and margin; None without matplotlib."""
    if not available():
        return None
    figure = new_figure(5.5 * len(verdicts), 4.8)
    panels = figure.subplots(1, len(verdicts), squeeze=False)[0]
    for panel, (direction, comparisons) in zip(panels, verdicts.items(), strict=True):
        for colour, comparison in zip(COLOURS, comparisons[:_LONGEST_LEGEND], strict=False):
            first, second = records[comparison.a], records[comparison.b]
            own, other = ranking_medians(first, direction), ranking_medians(second, direction)
            ratios = [100 * (other[number] / own[number] - 1) for number in own if number in other]
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
