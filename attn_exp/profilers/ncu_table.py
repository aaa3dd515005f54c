"""Nsight Compute's launches as kernels and as metrics of a pass."""

import re
from collections.abc import Iterable, Sequence

from attn_exp.core.profile import ProfiledKernel
from attn_exp.profilers.ncu_csv import CsvError, Launch
from attn_exp.profilers.ncu_metrics import Counter

_TIME = "gpu__time_duration.sum"
# Stalls below this share of a warp's time between two instructions say nothing about a pass.
_STALL_SHARE = 0.05


def split_passes(launches: Sequence[Launch], passes: Sequence[str], marker: str) -> dict[str, list[Launch]]:
    """The launches of each pass: they ran in this order, with a launch of `marker` between two of them.

    Raises:
        CsvError: there are not as many markers as there should be.
    """
    found: list[list[Launch]] = [[]]
    for launch in launches:
        if marker in launch.name:
            found.append([])
        else:
            found[-1].append(launch)
    if len(found) != len(passes):
        raise CsvError(f"{len(found) - 1} marks between passes are in ncu's table, not {len(passes) - 1}")
    return dict(zip(passes, found, strict=True))


def kernels(launches: Sequence[Launch], direction: str, counters: Sequence[Counter]) -> list[ProfiledKernel]:
    """One entry a kernel's name, the longest first: sums, and means weighted by time, over its launches in a call."""
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
    """The metrics of a pass, `forward/time_us` and so on; what belongs to single kernels alone is left out."""
    found = _together(launches, counters)
    own = ("registers", "shared_memory_bytes")
    kept = {name: value for name, value in found.items() if name not in own and not name.startswith("stall_")}
    shares = _stall_shares(launches, counters)
    kept |= {f"{name}_share": value for name, value in shares.items() if value > _STALL_SHARE}
    kept["kernels"] = float(len(launches))
    return {f"{direction}/{name}": value for name, value in kept.items()}


def _stall_shares(launches: Sequence[Launch], counters: Iterable[Counter]) -> dict[str, float]:
    """For what warps wait, as shares within each launch, weighted by the launches' times.

    The counters are cycles an instruction: of a short kernel that issues hardly any they are so large that a mean of
    them would speak of it and not of the pass.
    """
    stalls = [counter for counter in counters if counter.name.startswith("stall_")]
    found: dict[str, float] = {}
    weights = 0.0
    for launch in launches:
        cycles = {one.name: launch.values[one.metric] for one in stalls if one.metric in launch.values}
        whole, weight = sum(cycles.values()), launch.values.get(_TIME, 1.0)
        if whole:
            weights += weight
            for name, value in cycles.items():
                found[name] = found.get(name, 0.0) + weight * value / whole
    return {name: value / (weights or 1.0) for name, value in found.items()}


def _together(launches: Sequence[Launch], counters: Iterable[Counter]) -> dict[str, float]:
    """Each counter over several launches; one that a launch does not have is a mean of the others, and no sum."""
    found: dict[str, float] = {}
    for counter in counters:
        have = [one for one in launches if counter.metric in one.values]
        if not have or (counter.kind == "sum" and len(have) < len(launches)):
            continue
        values = [one.values[counter.metric] * counter.scale for one in have]
        if counter.kind == "sum":
            found[counter.name] = sum(values)
        else:
            weights = [one.values.get(_TIME, 1.0) for one in have]
            found[counter.name] = sum(map(_product, values, weights)) / (sum(weights) or 1.0)
    if {"dram_bytes_read", "dram_bytes_written"} <= set(found):
        found["dram_bytes"] = found["dram_bytes_read"] + found["dram_bytes_written"]
        if found.get("time_us"):
            found["dram_gb_per_s"] = found["dram_bytes"] / found["time_us"] / 1e3
    return found


def _shape(text: str) -> str:
    """`132x1x1` for `(132, 1, 1)`, as the other profilers' tables have it."""
    return "x".join(re.findall(r"\d+", text))


def _product(value: float, weight: float) -> float:
    return value * weight
