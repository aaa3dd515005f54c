"""Kernel tables: what ran in each pass, according to the timing's own trace and to each profiler."""

from collections.abc import Sequence
from typing import Any

from attn_exp.core.record.profile import IN_PLACE, Profile, ProfiledKernel
from attn_exp.core.record.record import Record
from attn_exp.core.sheet.render import fitted
from attn_exp.core.sheet.sheet import Column, Sheet
from attn_exp.core.text import SHORT, WIDTH, figures
from attn_exp.explain.rivals import short

# More rows do not fit on a page; the files have all.
_ROWS = 8
_LEAST_SHARE = 0.005
_NAME = 52
# The figures of a kernel that have a column; others are only in the files.
_FIGURES = (
    Column("grid", "grid", spare=4),
    Column("block", "block", spare=8),
    Column("registers", "registers", spare=5),
    Column("shared_memory_bytes", "shared\nbytes", spare=7),
    Column("occupancy_percent", "occupancy\n%", spare=2),
    Column("occupancy", "occupancy", spare=1),
    Column("gap_before_us", "gap\nbefore"),
    Column("tflops", "TFLOPS"),
    Column("gb_per_s", "GB/s"),
    Column(IN_PLACE, "in\nplace"),
    Column("dram_gb_per_s", "DRAM\nGB/s"),
    Column("dram_throughput", "DRAM\nshare", spare=3),
    Column("sm_throughput", "SM\nshare"),
    Column("tensor_active", "tensor\nshare"),
    Column("l2_hit_rate", "L2\nhits", spare=6),
)
_COLUMNS = (*(Column(name, name) for name in ("pass", "kernel", "count", "us", "share")), *_FIGURES)
_GAPS = (
    "gap before: us for which the device was idle. Tracing slows the host and the queue is empty, so gaps are longer "
    "than during timing"
)
_COPIES = (
    "in place: Inductor copies what these kernels write into before each call, so their us are too long and their "
    "GB/s too low"
)
# Fractions of one, like `share`.
_SHARES = ("occupancy", "dram_throughput", "sm_throughput", "tensor_active", "l2_hit_rate")


def kernel_tables(record: Record) -> list[str]:
    """Return a table of the timing's trace and one of each profiler that names kernels, each with a title."""
    timed = [
        ProfiledKernel(direction=direction, name=kernel.name, count=kernel.count, time_us=kernel.time_us)
        for direction, measured in record.passes.items()
        for kernel in measured.kernels
    ]
    what = "kernels" if record.request.device == "cuda" else "operators; nested ones are counted twice"
    # A profiler sees few calls, before the clock has settled, so its times may not add up to those above.
    lines = [f"By the trace of two calls before the timing ({what}):", _table(timed)] if timed else []
    for name, profile in record.profiles.items():
        if profile.kernels:
            known = [set(kernel.figures) for kernel in profile.kernels]
            notes = [_GAPS] if any("gap_before_us" in one for one in known) else []
            notes += [_COPIES] if any({IN_PLACE, "ms"} <= one for one in known) else []
            lines += ["", f"By profiler={name}:", _table(profile.kernels), *notes, *_rates(profile, record)]
    return lines


def _rates(profile: Profile, record: Record) -> list[str]:
    """Return a line per pass that a profiler measured as a whole; rates of single kernels are unknown."""
    lines = []
    for direction in record.request.measuring.passes:
        units = (("kernel_time_us", "us in kernels"), ("tflops", "TFLOPS"), ("gb_per_s", "GB/s of compulsory bytes"))
        known = [(profile.metrics.get(f"{direction}/{key}"), unit) for key, unit in units]
        if profile.metrics.get(f"{direction}/tflops"):
            lines.append(f"{direction}: {', '.join(f'{figures(value)} {unit}' for value, unit in known if value)}")
    return lines


def _table(kernels: Sequence[ProfiledKernel]) -> str:
    whole: dict[str, float] = {}
    for kernel in kernels:
        whole[kernel.direction] = whole.get(kernel.direction, 0.0) + (kernel.time_us or 0.0)
    rows, left = list[tuple[Any, ...]](), dict.fromkeys(whole, 0)
    for direction, total in whole.items():
        own = sorted((one for one in kernels if one.direction == direction), key=lambda one: -(one.time_us or 0.0))
        shown_here = [one for one in own[:_ROWS] if one is own[0] or (one.time_us or 0.0) >= _LEAST_SHARE * total]
        left[direction] = len(own) - len(shown_here)
        rows += [_row(kernel, total) for kernel in shown_here]
    text, _ = fitted(Sheet("kernels", "", _COLUMNS, tuple(rows)), WIDTH)
    more = [
        f"and {count} shorter {'one' if count == 1 else 'ones'} in {direction}"
        for direction, count in left.items()
        if count
    ]
    return "\n".join([text, *more])


def _row(kernel: ProfiledKernel, whole: float) -> tuple[Any, ...]:
    return (
        SHORT.get(kernel.direction, kernel.direction),
        short(kernel.name, _NAME),
        None if kernel.count is None else f"{kernel.count:g}",
        None if kernel.time_us is None else figures(kernel.time_us),
        f"{kernel.time_us / whole:.2f}" if kernel.time_us and whole else None,
        *(_cell(column.name, kernel.figures.get(column.name, "")) for column in _FIGURES),
    )


def _cell(name: str, value: float | str) -> str:
    if name == IN_PLACE:
        return "yes" if value else ""
    if isinstance(value, str):
        return value
    if name in _SHARES:
        return f"{value:.2f}"
    # Registers and bytes are counts, which records store as floats.
    return f"{value:.0f}" if value == int(value) else figures(value)
