"""The hardware counters to request from Nsight Compute, with our names and units."""

import re
from dataclasses import dataclass
from typing import Literal

from attn_exp.backends.package import Unavailable
from attn_exp.core.errors import nearest

# How to combine several kernels: a sum, or a mean weighted by time.
Kind = Literal["sum", "mean"]
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")


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
