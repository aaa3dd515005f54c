"""Read the hatchet trees of Triton's Proton: a scope for each pass, its kernels, and possibly their source lines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.errors import first_line
from attn_exp.core.profile import ProfiledKernel

_TIME = "time (ns)"
_SAMPLES = "num_samples"
_STALLED = "num_stalled_samples"
# A line is named `FILE:FUNCTION@LINE`.
_LINE_MARK = "@"
_STALL_PREFIX = "stalled_"
_READ = (_TIME, _SAMPLES, _STALLED, "count", "flops", "bytes")
# Sums and ratios of a few such numbers are finite.
_LARGEST = 1e60


class HatchetError(ValueError):
    """A file that is no tree of Proton's, or lacks the scope of a pass."""


class _Frame(msgspec.Struct):
    name: str


class _Node(msgspec.Struct):
    frame: _Frame
    children: "list[_Node]" = []
    metrics: dict[str, Any] = {}


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
    """Return the root of the tree in a hatchet file.

    Every node of it has a frame with a name, children and metrics, and the metrics that are read here are numbers.

    Raises:
        HatchetError: the file has no such tree.
    """
    try:
        # Every node is converted, so that nothing else has to look what a node is.
        root = msgspec.convert(json.loads(path.read_bytes())[0], _Node)
        tree = msgspec.to_builtins(root)
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise HatchetError(f"{path} is no hatchet tree: {first_line(error)}") from error
    assert isinstance(tree, dict)
    for node in _nodes(tree):
        for key, value in node["metrics"].items():
            if _is_read(key) and not (type(value) in (int, float) and 0 <= value <= _LARGEST):
                raise HatchetError(f"{path} is no hatchet tree: {key} of {node['frame']['name'][:80]} is {value!r:.40}")
    return tree


def kernels_of(root: dict[str, Any], direction: str, calls: int) -> tuple[ProfiledKernel, ...]:
    """Return the kernels of a pass, longest first, for one of `calls` calls.

    With rates if the pass is a single kernel.

    Raises:
        HatchetError: the tree has no scope of that name.
    """
    scope = _scope(root, direction)
    times: dict[str, float] = {}
    counts: dict[str, float] = {}
    for node in _leaves(scope, _TIME):
        name, metrics = node["frame"]["name"], node["metrics"]
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
    total_ns = sum(node["metrics"][_TIME] for node in _leaves(scope, _TIME))
    if not total_ns:
        return {}
    sizes = {"tflops": ("flops", 1e3), "gb_per_s": ("bytes", 1.0)}
    metrics = scope["metrics"]
    return {name: metrics[key] / total_ns / unit for name, (key, unit) in sizes.items() if metrics.get(key)}


def lines_of(root: dict[str, Any], direction: str) -> tuple[Line, ...]:
    """Return the source lines of a pass's kernels by samples of the program counter, most sampled first.

    A kernel without lines has the samples itself and an empty `place`.
    """
    lines_by_samples: list[Line] = []
    for node in _nodes(_scope(root, direction)):
        below = [child for child in node["children"] if _LINE_MARK in child["frame"]["name"]]
        lines = [child for child in below if _SAMPLES in child["metrics"]]
        total = sum(child["metrics"][_SAMPLES] for child in lines)
        lines_by_samples += [_line(direction, node, child, child["frame"]["name"], total) for child in lines]
        leaf = not node["children"] and _LINE_MARK not in node["frame"]["name"]
        if leaf and node["metrics"].get(_SAMPLES):
            lines_by_samples.append(_line(direction, node, node, "", node["metrics"][_SAMPLES]))
    return tuple(sorted(lines_by_samples, key=lambda line: -line.samples))


def _line(direction: str, kernel: dict[str, Any], sampled: dict[str, Any], place: str, total: float) -> Line:
    metrics = sampled["metrics"]
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
    for node in root["children"]:
        if node["frame"]["name"] == direction:
            assert isinstance(node, dict)
            return node
    raise HatchetError(f"the tree has no scope '{direction}'")


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a node and all below it, parents first."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += reversed(one["children"])


def _leaves(node: dict[str, Any], metric: str) -> Iterator[dict[str, Any]]:
    """Yield the lowest nodes that have a metric; sums above them would count twice."""
    for one in _nodes(node):
        below = any(metric in child["metrics"] for child in one["children"])
        if metric in one["metrics"] and not below:
            yield one


def _is_read(key: str) -> bool:
    return key in _READ or key.startswith(_STALL_PREFIX)
