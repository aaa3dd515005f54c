"""The page of a sweep: its jobs by case, and which backends ran the same kernel."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from attn_exp.compare.grouping import way
from attn_exp.compare.result import Result, named
from attn_exp.explain.find import Found
from attn_exp.explain.rivals import kind, short
from attn_exp.tables import SHORT, figures, grid

# One page: a sweep of more cases has comparisons.
_CASES = 6


def sweep_page(found: Found) -> str:
    """A table a case, the fastest first, and below it who ran the same kernel."""
    groups: dict[Any, list[Result]] = defaultdict(list)
    for result in found.results:
        groups[result.case, way(result), result.device_name].append(result)
    cases = "one case" if len(groups) == 1 else f"{len(groups)} cases"
    parts = [f"sweep {found.results[0].sweep}: {len(found.results)} jobs on {cases}"]
    for key, results in list(groups.items())[:_CASES]:
        passes = results[0].measuring.passes
        several = sorted(named(results), key=lambda one: (one.status != "ok", _sum_us(one), one.label))
        # Without a device: what could not be measured knows none.
        parts.append(
            "\n".join([f"{key[0].label()}, {results[0].device_name}".rstrip(", "), "", _table(several, passes)])
        )
        parts += ["\n".join(lines) for lines in [same_kernels(several)] if lines]
    if len(groups) > _CASES:
        parts.append(f"and {len(groups) - _CASES} more cases: python -m attn_exp.compare sweep=NAME has them all")
    parts += [f"skipped: {said}" for said in found.broken]
    parts.append("a page about one job: python -m attn_exp.explain SWEEP/JOB")
    return "\n\n".join(parts)


def same_kernels(results: Sequence[Result]) -> list[str]:
    """For each pass, who spent most of it in which kernel; those of one kernel stand together.

    Nothing is said of operators: SDPA's are one wrapper around whatever computes it.
    """
    lines: list[str] = []
    if kind(results[0]) != "kernel":
        return lines
    for direction in SHORT:
        ran: dict[str, list[str]] = defaultdict(list)
        for result in results:
            if result.status == "ok" and direction in result.kernels:
                ran[result.kernels[direction]].append(result.label)
        for name, labels in sorted(ran.items(), key=lambda one: -len(one[1])):
            who = f"{', '.join(labels)} ran one and the same kernel:" if len(labels) > 1 else f"{labels[0]} alone ran"
            lines.append(f"{direction}: {who} {short(name)}")
    return lines


def _table(results: Sequence[Result], passes: Sequence[str]) -> str:
    rows = []
    for result in results:
        row = {"backend": result.label, "status": result.status}
        for direction in passes:
            for name, head in (("time_us", "us"), ("tflops", "TFLOPS")):
                value = result.metrics.get(f"{direction}/{name}")
                row[f"{SHORT[direction]} {head}"] = "" if value is None else figures(value)
        rows.append(row)
    return grid(rows, list(rows[0]))


def _sum_us(result: Result) -> float:
    return sum(value for name, value in result.metrics.items() if name.endswith("/time_us") and name.count("/") == 1)
