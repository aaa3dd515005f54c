"""Read the hatchet trees of Triton's Proton: a scope for each pass, its kernels, and possibly their source lines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_exp.core.record.profile import ProfiledKernel

_TIME = "time (ns)"
_SAMPLES = "num_samples"
_STALLED = "num_stalled_samples"
# A line is named `FILE:FUNCTION@LINE`.
_LINE_MARK = "@"
_STALL_PREFIX = "stalled_"


@dataclass(frozen=True)
class Line:
    """A line of a kernel's source with its samples of the program counter.

    `place` is empty if samples are known only by kernel. `stall` is the most frequent reason to wait, in CUPTI's terms.
    """

    direction: str
    kernel: str
    place: str
    samples: float
    share: float
    stalled_share: float
    stall: str


def read_tree(path: Path) -> dict[str, Any]:
    """Return the root of the tree in a hatchet file: nodes with a frame, children, and possibly metrics."""
    root: dict[str, Any] = json.loads(path.read_bytes())[0]
    return root


def kernels_of(root: dict[str, Any], direction: str, calls: int) -> tuple[ProfiledKernel, ...]:
    """Return the kernels of a pass, longest first, for one of `calls` calls.

    With rates if the pass is a single kernel.
    """
    scope = _scope(root, direction)
    times: dict[str, float] = {}
    counts: dict[str, float] = {}
    for node in _timed(scope):
        name, metrics = node["frame"]["name"], _metrics(node)
        times[name] = times.get(name, 0.0) + metrics[_TIME]
        counts[name] = counts.get(name, 0.0) + metrics.get("count", 0)
    only_kernel_rates = rates(root, direction) if len(times) == 1 else {}
    return tuple(
        ProfiledKernel(
            direction=direction,
            name=name,
            count=counts[name] / calls,
            time_us=times[name] / calls / 1e3,
            figures=dict(only_kernel_rates),
        )
        for name in sorted(times, key=lambda name: -times[name])
    )


def rates(root: dict[str, Any], direction: str) -> dict[str, float]:
    """Return `tflops` and `gb_per_s` of a pass: its scope's work and bytes over the time of its kernels."""
    scope = _scope(root, direction)
    total_ns = sum(_metrics(node)[_TIME] for node in _timed(scope))
    if not total_ns:
        return {}
    sizes = {"tflops": ("flops", 1e3), "gb_per_s": ("bytes", 1.0)}
    metrics = _metrics(scope)
    return {name: metrics[key] / total_ns / unit for name, (key, unit) in sizes.items() if metrics.get(key)}


def lines_of(root: dict[str, Any], direction: str) -> tuple[Line, ...]:
    """Return the source lines of a pass's kernels by samples of the program counter, most sampled first.

    A kernel without lines has the samples itself and an empty `place`.
    """
    lines_by_samples: list[Line] = []
    for node in _nodes(_scope(root, direction)):
        below = [child for child in node["children"] if _LINE_MARK in child["frame"]["name"]]
        lines = [child for child in below if _SAMPLES in _metrics(child)]
        total = sum(_metrics(child)[_SAMPLES] for child in lines)
        lines_by_samples += [_line(direction, node, child, child["frame"]["name"], total) for child in lines]
        leaf = not node["children"] and _LINE_MARK not in node["frame"]["name"]
        if leaf and _metrics(node).get(_SAMPLES):
            lines_by_samples.append(_line(direction, node, node, "", _metrics(node)[_SAMPLES]))
    return tuple(sorted(lines_by_samples, key=lambda line: -line.samples))


def _line(direction: str, kernel: dict[str, Any], sampled: dict[str, Any], place: str, total: float) -> Line:
    metrics = _metrics(sampled)
    samples = metrics[_SAMPLES]
    stalls = {name: value for name, value in metrics.items() if name.startswith(_STALL_PREFIX) and value}
    return Line(
        direction=direction,
        kernel=kernel["frame"]["name"],
        place=place,
        samples=samples,
        share=samples / total if total else 0.0,
        stalled_share=metrics.get(_STALLED, 0.0) / samples if samples else 0.0,
        stall=max(stalls, key=lambda name: stalls[name]).removeprefix(_STALL_PREFIX) if stalls else "",
    )


def _scope(root: dict[str, Any], direction: str) -> dict[str, Any]:
    """Return the scope of a pass; raises ValueError if there is none."""
    scopes: list[dict[str, Any]] = [node for node in root["children"] if node["frame"]["name"] == direction]
    if not scopes:
        raise ValueError(f"the tree has no scope '{direction}'")
    return scopes[0]


def _metrics(node: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = node.get("metrics", {})
    return metrics


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a node and all below it, parents first."""
    yield node
    for child in node["children"]:
        yield from _nodes(child)


def _timed(scope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lowest nodes that have a time; sums above them would count twice."""
    for node in _nodes(scope):
        below = any(_TIME in _metrics(child) for child in node["children"])
        if _TIME in _metrics(node) and not below:
            yield node
