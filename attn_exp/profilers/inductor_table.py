"""Inductor's kernels as rows: PyTorch's columns, Inductor's bandwidth profile, and Nsight Compute's counters."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from attn_exp.core.record.profile import ProfiledKernel
from attn_exp.profilers.base import csv_text
from attn_exp.profilers.inductor_code import COLUMNS, Generated

BANDWIDTH = ("ms", "gb", "gb_per_s", "share")
NCU = ("ncu_duration_us", "ncu_mem_bw_gbps", "ncu_mem_accessed_gb")
_SECTION = re.compile(r"^TRITON KERNELS BANDWIDTH INFO \((.*)\)$")
_ROW = re.compile(r"^([\d.]+)ms\s+([\d.]+) GB\s+([\d.]+)GB/s\s+([\d.]+)%\s+(\S+)$")


@dataclass(frozen=True)
class Bandwidth:
    """Inductor's measurement of a kernel: milliseconds, 10^9 bytes, GB/s, and its share of the graph's time."""

    ms: float
    gb: float
    gb_per_s: float
    share: float


def read_bandwidth(text: str) -> dict[str, dict[str, Bandwidth]]:
    """Return Inductor's bandwidth profile by generated file and kernel; of several calls the first."""
    bandwidths: dict[str, dict[str, Bandwidth]] = {}
    rows: dict[str, Bandwidth] = {}
    for line in text.splitlines():
        section, row = _SECTION.match(line), _ROW.match(line)
        if section:
            rows = bandwidths.setdefault(section[1], {})
        elif row:
            ms, gb, rate, share, name = row.groups()
            rows.setdefault(name, Bandwidth(float(ms), float(gb), float(rate), float(share) / 100))
    return bandwidths


def row_of(
    direction: str, kernel: Generated, path: str, bandwidth: Bandwidth | None, counted: ProfiledKernel | None
) -> ProfiledKernel:
    """Return one kernel with all its known figures.

    `counted` is Nsight Compute's entry of the same kernel in the same pass; its sums are over the launches of a call.
    """
    figures: dict[str, float | str] = {**kernel.columns, "kernel_name": kernel.name, "kernel_path": path}
    if bandwidth is not None:
        figures |= {name: getattr(bandwidth, name) for name in BANDWIDTH}
    if counted is not None and counted.count:
        moved, rate = counted.figures.get("dram_bytes"), counted.figures.get("dram_gb_per_s")
        if counted.time_us is not None:
            figures["ncu_duration_us"] = counted.time_us / counted.count
        if isinstance(rate, float):
            figures["ncu_mem_bw_gbps"] = rate
        if isinstance(moved, float):
            figures["ncu_mem_accessed_gb"] = moved / counted.count / 1e9
    time_us = bandwidth.ms * 1e3 * kernel.calls if bandwidth is not None else None
    return ProfiledKernel(
        direction=direction, name=kernel.name, count=float(kernel.calls), time_us=time_us, figures=figures
    )


def table_csv(kernels: Sequence[ProfiledKernel]) -> str:
    """Return one row for each kernel: `pass`, `calls`, then the columns that any of them has."""
    known = {name for kernel in kernels for name in kernel.figures}
    shown = [name for name in (*COLUMNS, *BANDWIDTH, *NCU) if name in known]
    rows = ([one.direction, f"{one.count:g}", *map(one.figures.get, shown)] for one in kernels)
    return csv_text(["pass", "calls", *shown], rows)
