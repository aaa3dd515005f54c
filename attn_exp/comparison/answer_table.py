"""The table of an answer: a row a case and pass, a column a kernel, the winner and its ties marked."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from attn_exp.comparison.columns import case_pairs
from attn_exp.comparison.join import WAYS
from attn_exp.comparison.ranking import Ranking, by_group, winners
from attn_exp.comparison.ratio import geometric_mean
from attn_exp.core.record.checked import yes_or_no
from attn_exp.core.record.metrics import metric_named
from attn_exp.core.record.status import STATUSES
from attn_exp.core.sheet.sheet import MARK, Column, Sheet, split
from attn_exp.core.text import printable
from attn_exp.results.cell import ChosenMetric
from attn_exp.results.result import Result

# The mark of a value that was not measured well enough.
NOISE = "?"
# The metric of each choice of `show=`.
_METRICS = {"tflops": "tflops", "us": "time_us", "gb/s": "gb_per_s"}


def answer_table(rows: Sequence[Ranking], metric: ChosenMetric, show: str = "auto") -> Sheet:
    """Return the table of the ranked rows of all cases and passes.

    Backends stand in the order of their mean speed. A narrow table omits the slowest of those that win nowhere. Names
    of one kernel that do not differ are one column, with the geometric mean of their values. A row without a value has
    its status, and a backend without any value no column. For times, `show=auto` takes GB/s for decoding and
    microseconds on a CPU.
    """
    name = _shown(rows, show) if metric.name in _METRICS.values() else metric.name
    labels, groups = _by_speed(rows, metric), by_group(rows)
    tables = [{row.label: row for row in group} for group in groups]
    valued = {row.label for row in rows if row.cell.value is not None}
    kernels = _by_kernel([label for label in labels if label in valued], tables)
    # Timer and device have columns of their own.
    ways = [
        way for way in WAYS if way not in ("timer", "device") and len({WAYS[way](_told(one)) for one in groups}) > 1
    ]
    case_columns, case_values = split(case_pairs(rows))
    lines, won = [], set[int]()
    for group, table in zip(groups, tables, strict=True):
        best = set() if metric.kind.is_fact else {id(row) for row in winners(group)}
        columns_rows = [[table[label] for label in names if label in table] for names in kernels]
        here = {at for at, own in enumerate(columns_rows) if any(id(row) in best for row in own)}
        won |= here
        texts = [MARK * (at in here) + _text(own, name) for at, own in enumerate(columns_rows)]
        own = (WAYS[way](_told(group)) for way in ways)
        lines.append((*case_values(group[0]), *own, group[0].cell.direction, *texts))
    heads = [", ".join(names) for names in kernels]
    columns = (
        *case_columns,
        *(Column(way, way) for way in ways),
        Column("pass", "pass"),
        # The first is never omitted.
        *(Column(head, head, "right", spare=at and at + len(heads) * (at not in won)) for at, head in enumerate(heads)),
    )
    title = metric_named(name).head.replace("bytes", "MiB")
    if won:
        title += f"; {MARK} {'fastest' if metric.kind.follows_clock else 'best'}, or too close to it to call"
    note = _without_number([label for label in labels if label not in valued], rows)
    if any(NOISE in line for line in lines):
        title += f"; {NOISE} not measured well enough, its interval is wider than +-25 %"
    return Sheet("answer", title, columns, tuple(lines), note=note)


def _by_kernel(labels: Sequence[str], tables: Sequence[Mapping[str, Ranking]]) -> list[list[str]]:
    """Return the labels, those together that are one rival wherever both have a value; the shortest name first."""

    def one(label: str, other: str) -> bool:
        both = [(table[label], table[other]) for table in tables if label in table and other in table]
        pairs = [row for row, over in both if row.cell.value is not None and over.cell.value is not None]
        return bool(pairs) and all(other in row.same for row in pairs)

    kernels: list[list[str]] = []
    for label in labels:
        names = next((names for names in kernels if all(one(label, other) for other in names)), None)
        if names is None:
            kernels.append([label])
        else:
            names.append(label)
    return [sorted(names, key=lambda name: (len(name), name)) for names in kernels]


def _without_number(labels: Sequence[str], rows: Sequence[Ranking]) -> str:
    """Return a line that names the labels and why they have no number; empty if there are none."""
    why: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        statuses = {row.cell.result.status for row in rows if row.label == label}
        why[", ".join(sorted("no value" if status == "ok" else status for status in statuses))].append(label)
    each = "; ".join(f"{', '.join(names)} ({statuses})" for statuses, names in why.items())
    return each and printable(f"no number: {each}")


def _told(group: Sequence[Ranking]) -> Result:
    """Return a result of the group that knows its device: a job that failed does not."""
    return next((row.cell.result for row in group if row.cell.result.status == "ok"), group[0].cell.result)


def _shown(rows: Sequence[Ranking], show: str) -> str:
    if show != "auto":
        return _METRICS[show]
    results = [row.cell.result for row in rows]
    if all(result.device == "cpu" for result in results):
        return "time_us"
    return "gb_per_s" if all(result.case.q_len == 1 for result in results) else "tflops"


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


def _text(rows: Sequence[Ranking], name: str) -> str:
    ok = [row.cell for row in rows if row.cell.result.status == "ok"]
    if ok and all(cell.value is not None and not cell.compared for cell in ok):
        return NOISE
    found = [cell.result.metrics.get(f"{cell.direction}/{name}") for cell in ok]
    values = [value for value in found if value is not None]
    if not values:
        statuses = [row.cell.result.status for row in rows if row.cell.result.status != "ok"]
        return next((STATUSES[status].short or status for status in statuses), "")
    if metric_named(name).is_fact:
        return yes_or_no(max(values))
    value = values[0] if len(values) == 1 else math.prod(values) ** (1 / len(values))
    value = value / 2**20 if name.endswith("_bytes") else value
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
