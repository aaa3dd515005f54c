"""The table of an answer: a row a case and pass, a column a backend, the winner and its ties marked."""

import math
from collections import defaultdict
from collections.abc import Sequence

from attn_exp.compare.join import WAYS
from attn_exp.compare.page_parts import case_part, case_values
from attn_exp.compare.ranking import Ranking, by_group, winners
from attn_exp.compare.ratio import geometric_mean
from attn_exp.compare.sheet import MARK, Column, Sheet
from attn_exp.core.record.metrics import metric_named
from attn_exp.core.record.status import STATUSES
from attn_exp.results.cell import ChosenMetric
from attn_exp.results.result import Result

# The metric of each choice of `show=`.
_METRICS = {"tflops": "tflops", "us": "time_us", "gb/s": "gb_per_s"}


def answer_table(rows: Sequence[Ranking], metric: ChosenMetric, show: str = "auto") -> Sheet:
    """Return the table of the ranked rows of all cases and passes.

    Backends stand in the order of their mean speed, so that a narrow table omits the slowest. A row without a value has
    its status. For times, `show=auto` takes GB/s for decoding and microseconds on a CPU.
    """
    name = _shown(rows, show) if metric.name in _METRICS.values() else metric.name
    labels, groups = _by_speed(rows, metric), by_group(rows)
    # Timer and device have columns of their own.
    ways = [
        way for way in WAYS if way not in ("timer", "device") and len({WAYS[way](_told(one)) for one in groups}) > 1
    ]
    columns = (
        *case_part([row.cell for row in rows]),
        *(Column(way, way) for way in ways),
        Column("pass", "pass"),
        # The first is never omitted.
        *(Column(label, label, "right", spare=at) for at, label in enumerate(labels)),
    )
    lines, any_won = [], False
    for group in groups:
        best = {id(row) for row in winners(group, metric)}
        any_won = any_won or bool(best)
        texts = {row.label: MARK * (id(row) in best) + _text(row, name) for row in group}
        own = (WAYS[way](_told(group)) for way in ways)
        cell = group[0].cell
        lines.append((*case_values(cell), *own, cell.direction, *(texts.get(label, "") for label in labels)))
    title = metric_named(name).head.replace("bytes", "MiB")
    if any_won:
        title += f"; {MARK} {'fastest' if metric.kind.follows_clock else 'best'}, or too close to it to call"
    return Sheet("answer", title, columns, tuple(lines))


def _told(group: Sequence[Ranking]) -> Result:
    """Return a result of the group that knows its device: a job that failed does not."""
    return next((row.cell.result for row in group if row.cell.result.status == "ok"), group[0].cell.result)


def _shown(rows: Sequence[Ranking], show: str) -> str:
    if show != "auto":
        return _METRICS[show]
    results = [row.cell.result for row in rows]
    if all(one.device == "cpu" for one in results):
        return "time_us"
    return "gb_per_s" if all(one.case.q_len == 1 for one in results) else "tflops"


def _by_speed(rows: Sequence[Ranking], metric: ChosenMetric) -> list[str]:
    """Return the backends, the best in the geometric mean first; those with less than half of the rows last."""
    logs: dict[str, list[float]] = defaultdict(list)
    groups = by_group(rows)
    for group in groups:
        values = [row.cell.value for row in group if row.cell.value and row.cell.value > 0]
        for row in group:
            if row.cell.value and row.cell.value > 0:
                logs[row.label].append(math.log(row.cell.value / min(values)))
    sign = -1 if metric.kind.higher_is_better else 1

    def order(label: str) -> tuple[bool, float, str]:
        own = logs[label]
        return 2 * len(own) < len(groups), sign * geometric_mean(own) if own else math.inf, label

    return sorted(dict.fromkeys(row.label for row in rows), key=order)


def _text(row: Ranking, name: str) -> str:
    result = row.cell.result
    if result.status != "ok":
        return STATUSES[result.status].short or result.status
    value = result.metrics.get(f"{row.cell.direction}/{name}")
    if value is None:
        return ""
    value = value / 2**20 if name.endswith("_bytes") else value
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
