"""Read Nsight Compute's launches, and combine them into kernels and metrics of a pass."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from attn_exp.backends.package import Unavailable
from attn_exp.core.errors import nearest
from attn_exp.core.record.profile import ProfiledKernel
from attn_exp.profilers.ncu_program import NcuError

# How to combine several kernels: a sum, or a mean weighted by time.
Kind = Literal["sum", "mean"]
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
_TIME = "gpu__time_duration.sum"
# Stalls below this share of a warp's time between two instructions are irrelevant for a pass.
_STALL_SHARE = 0.05
_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# The base units that we request (`--print-units base`), some of which still come with a prefix.
_SCALED = ("byte", "hz", "cycle", "inst")
_SECONDS = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9}


@dataclass(frozen=True)
class Counter:
    """A metric of Nsight Compute under our name; `scale` converts its base unit to ours (percent to a share)."""

    name: str
    metric: str
    kind: Kind = "mean"
    scale: float = 1.0


COUNTERS = (
    Counter("time_us", "gpu__time_duration.sum", "sum", 1e-3),
    Counter("dram_bytes_read", "dram__bytes_read.sum", "sum"),
    Counter("dram_bytes_written", "dram__bytes_write.sum", "sum"),
    Counter("dram_throughput", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", scale=1e-2),
    Counter("sm_throughput", "sm__throughput.avg.pct_of_peak_sustained_elapsed", scale=1e-2),
    Counter("tensor_active", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", scale=1e-2),
    Counter("l2_hit_rate", "lts__t_sector_hit_rate.pct", scale=1e-2),
    Counter("occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active", scale=1e-2),
    Counter("sm_clock_mhz", "gpc__cycles_elapsed.avg.per_second", scale=1e-6),
    Counter("registers", "launch__registers_per_thread"),
    Counter("shared_memory_bytes", "launch__shared_mem_per_block"),
)


def counters_for(known: frozenset[str]) -> tuple[Counter, ...]:
    """Return the counters to request: those that the program lists, and those of the launch, which it does not list.

    A stall is in cycles between two instructions of a warp.
    """
    stalls = [match for match in map(_STALL.fullmatch, sorted(known)) if match]
    asked = (*COUNTERS, *(Counter(f"stall_{match[1]}", f"{match[0]}.ratio") for match in stalls))
    return tuple(one for one in asked if one.metric.startswith("launch__") or one.metric.split(".")[0] in known)


def own_counter(metric: str, known: frozenset[str]) -> Counter:
    """Return a metric that the user requested by ncu's name. Raises Unavailable if the program does not list it."""
    base = metric.split(".")[0]
    if base not in known and not base.startswith("launch__"):
        near = nearest(base, known)
        raise Unavailable(f"ncu has no metric {base} on this GPU: {near}leave it out of profiler.ncu.metrics")
    return Counter(metric, metric, "sum" if metric.endswith(".sum") else "mean")


def known_names(listing: str) -> frozenset[str]:
    """Return the base names that `ncu --query-metrics` prints: the first word of each line that looks like one."""
    return frozenset(re.findall(r"^([a-z][a-z0-9]*__\w+)(?=\s|$)", listing, re.MULTILINE))


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its name, launch shape, and values in base units (ns, byte, percent) by metric."""

    name: str
    grid: str
    block: str
    values: dict[str, float]


def read_launches(text: str) -> list[Launch]:
    """Return the launches of the CSV (`--csv --page raw`) in the order in which they ran.

    Raises NcuError if other lines of the program are all that there is.
    """
    rows = [row for row in csv.reader(io.StringIO(text)) if row and not row[0].startswith("==")]
    start = next((index for index, row in enumerate(rows) if "Kernel Name" in row), None)
    if start is None:
        raise NcuError("ncu printed no table of kernels")
    header, units, *own = rows[start:]
    launches = []
    for row in own:
        cells = dict(zip(header, row, strict=True))
        values = {}
        for (name, cell), unit in zip(cells.items(), units, strict=True):
            if "__" in name and (number := _number(cell)) is not None:
                values[name] = number * _factor(unit)
        grid, block = cells.get("Grid Size", ""), cells.get("Block Size", "")
        launches.append(Launch(cells["Kernel Name"], grid, block, values))
    return launches


def split_passes(launches: Sequence[Launch], passes: Sequence[str], marker: str) -> dict[str, list[Launch]]:
    """Split the launches, which ran in this order with a launch of `marker` between two passes.

    Raises NcuError if the number of markers is wrong.
    """
    parts: list[list[Launch]] = [[]]
    for launch in launches:
        if marker in launch.name:
            parts.append([])
        else:
            parts[-1].append(launch)
    if len(parts) != len(passes):
        raise NcuError(f"{len(parts) - 1} markers between passes are in ncu's table, not {len(passes) - 1}")
    return dict(zip(passes, parts, strict=True))


def kernels(launches: Sequence[Launch], direction: str, counters: Sequence[Counter]) -> list[ProfiledKernel]:
    """Return one entry for each kernel's name, longest first.

    Figures are sums and time-weighted means over the kernel's launches in a call.
    """
    by_name: dict[str, list[Launch]] = {}
    for launch in launches:
        by_name.setdefault(launch.name, []).append(launch)
    made = []
    for name, own in by_name.items():
        combined = _together(own, counters)
        time_us = combined.pop("time_us", None)
        shapes = {"grid": {_shape(one.grid) for one in own}, "block": {_shape(one.block) for one in own}}
        alike = {key: next(iter(values)) for key, values in shapes.items() if len(values) == 1 and "" not in values}
        figures: dict[str, float | str] = {**combined, **alike}
        made.append(
            ProfiledKernel(direction=direction, name=name, count=float(len(own)), time_us=time_us, figures=figures)
        )
    return sorted(made, key=lambda one: -(one.time_us or 0.0))


def pass_figures(launches: Sequence[Launch], direction: str, counters: Sequence[Counter]) -> dict[str, float]:
    """Return the metrics of a pass, `forward/time_us` and so on, without those that only describe single kernels."""
    combined = _together(launches, counters)
    own = ("registers", "shared_memory_bytes")
    kept = {name: value for name, value in combined.items() if name not in own and not name.startswith("stall_")}
    shares = _stall_shares(launches, counters)
    kept |= {f"{name}_share": value for name, value in shares.items() if value > _STALL_SHARE}
    kept["kernels"] = float(len(launches))
    return {f"{direction}/{name}": value for name, value in kept.items()}


def _stall_shares(launches: Sequence[Launch], counters: Iterable[Counter]) -> dict[str, float]:
    """Return why warps wait, as shares within each launch, weighted by the launches' times.

    A mean of the cycles would describe short kernels with few instructions instead of the pass.
    """
    stalls = [counter for counter in counters if counter.name.startswith("stall_")]
    shares: dict[str, float] = {}
    weights = 0.0
    for launch in launches:
        cycles = {stall.name: launch.values[stall.metric] for stall in stalls if stall.metric in launch.values}
        whole, weight = sum(cycles.values()), launch.values.get(_TIME, 1.0)
        if whole:
            weights += weight
            for name, value in cycles.items():
                shares[name] = shares.get(name, 0.0) + weight * value / whole
    return {name: value / (weights or 1.0) for name, value in shares.items()}


def _together(launches: Sequence[Launch], counters: Iterable[Counter]) -> dict[str, float]:
    """Return each counter over several launches. If a launch lacks it, it is a mean of the others, and never a sum."""
    combined: dict[str, float] = {}
    for counter in counters:
        have = [launch for launch in launches if counter.metric in launch.values]
        if not have or (counter.kind == "sum" and len(have) < len(launches)):
            continue
        values = [one.values[counter.metric] * counter.scale for one in have]
        if counter.kind == "sum":
            combined[counter.name] = sum(values)
        else:
            weights = [one.values.get(_TIME, 1.0) for one in have]
            combined[counter.name] = sum(value * weight for value, weight in zip(values, weights, strict=True)) / (
                sum(weights) or 1.0
            )
    if {"dram_bytes_read", "dram_bytes_written"} <= set(combined):
        combined["dram_bytes"] = combined["dram_bytes_read"] + combined["dram_bytes_written"]
        if combined.get("time_us"):
            combined["dram_gb_per_s"] = combined["dram_bytes"] / combined["time_us"] / 1e3
    return combined


def _shape(text: str) -> str:
    """Return `132x1x1` for `(132, 1, 1)`, as in the other profilers' tables."""
    return "x".join(re.findall(r"\d+", text))


def _number(cell: str) -> float | None:
    """Parse `5,472` and `0.82`; return None for text and missing values (`n/a`, `nan`, `(!) nan`)."""
    try:
        number = float(cell.replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _factor(unit: str) -> float:
    """Return the factor from a unit to its base unit: nanoseconds, bytes, hertz, rates per second."""
    if unit in _SECONDS:
        return _SECONDS[unit]
    head, _, per = unit.partition("/")
    rate = 1e9 / _SECONDS[per] if per in _SECONDS else 1.0
    for name in _SCALED:
        if head.lower().endswith(name):
            return rate * _PREFIXES.get(head[: -len(name)], 1.0)
    return rate
