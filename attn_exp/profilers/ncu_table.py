"""Combine Nsight Compute's launches into kernels and metrics of a pass."""

import re
from collections.abc import Iterable, Sequence

from attn_exp.core.profile import ProfiledKernel
from attn_exp.profilers.ncu_csv import CsvError, Launch
from attn_exp.profilers.ncu_metrics import Counter

_TIME = "gpu__time_duration.sum"
# Stalls below this share of a warp's time between two instructions are irrelevant for a pass.
_STALL_SHARE = 0.05


def split_passes(launches: Sequence[Launch], passes: Sequence[str], marker: str) -> dict[str, list[Launch]]:
    """Split the launches, which ran in this order with a launch of `marker` between two passes.

    Raises:
        CsvError: the number of markers is wrong.
    """
    parts: list[list[Launch]] = [[]]
    for launch in launches:
        if marker in launch.name:
            parts.append([])
        else:
            parts[-1].append(launch)
    if len(parts) != len(passes):
        raise CsvError(f"{len(parts) - 1} markers between passes are in ncu's table, not {len(passes) - 1}")
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
        figures: dict[str, float | str] = dict(_together(own, counters))
        time_us = figures.pop("time_us", None)
        shapes = {"grid": {_shape(one.grid) for one in own}, "block": {_shape(one.block) for one in own}}
        figures |= {key: next(iter(values)) for key, values in shapes.items() if len(values) == 1 and "" not in values}
        made.append(
            ProfiledKernel(
                direction=direction,
                name=name,
                count=float(len(own)),
                time_us=time_us if isinstance(time_us, float) else None,
                figures=figures,
            )
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

    The counters are cycles per instruction. For a short kernel with few instructions they are so large that their mean
    would describe that kernel instead of the pass.
    """
    stalls = [counter for counter in counters if counter.name.startswith("stall_")]
    shares: dict[str, float] = {}
    weights = 0.0
    for launch in launches:
        cycles = {one.name: launch.values[one.metric] for one in stalls if one.metric in launch.values}
        whole, weight = sum(cycles.values()), launch.values.get(_TIME, 1.0)
        if whole:
            weights += weight
            for name, value in cycles.items():
                shares[name] = shares.get(name, 0.0) + weight * value / whole
    return {name: value / (weights or 1.0) for name, value in shares.items()}


def _together(launches: Sequence[Launch], counters: Iterable[Counter]) -> dict[str, float]:
    """Return each counter over several launches.

    If a launch lacks it, it is a mean of the others, and never a sum.
    """
    combined: dict[str, float] = {}
    for counter in counters:
        have = [one for one in launches if counter.metric in one.values]
        if not have or (counter.kind == "sum" and len(have) < len(launches)):
            continue
        values = [one.values[counter.metric] * counter.scale for one in have]
        if counter.kind == "sum":
            combined[counter.name] = sum(values)
        else:
            weights = [one.values.get(_TIME, 1.0) for one in have]
            combined[counter.name] = sum(map(_product, values, weights)) / (sum(weights) or 1.0)
    if {"dram_bytes_read", "dram_bytes_written"} <= set(combined):
        combined["dram_bytes"] = combined["dram_bytes_read"] + combined["dram_bytes_written"]
        if combined.get("time_us"):
            combined["dram_gb_per_s"] = combined["dram_bytes"] / combined["time_us"] / 1e3
    return combined


def _shape(text: str) -> str:
    """Return `132x1x1` for `(132, 1, 1)`, as in the other profilers' tables."""
    return "x".join(re.findall(r"\d+", text))


def _product(value: float, weight: float) -> float:
    return value * weight
