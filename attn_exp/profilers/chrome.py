"""Read Chrome traces of PyTorch's profiler: the kernels of each pass on a GPU, the operators on a CPU."""

import bisect
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from attn_exp.core.record.profile import ProfiledKernel

# The range around each call in a trace: this prefix and the pass. Launches outside of the ranges are not counted.
PREFIX = "attn_exp:"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGE, _OPERATOR = "user_annotation", "cpu_op"
# Kineto's names of a kernel's figures, and ours.
_FIGURES = {
    "grid": "grid",
    "block": "block",
    "registers per thread": "registers",
    "shared memory": "shared_memory_bytes",
    "est. achieved occupancy %": "occupancy_percent",
    "warps per SM": "warps_per_sm",
    "stream": "stream",
}


class _Event(msgspec.Struct, gc=False):
    """An event that is read; times are in microseconds."""

    name: str
    ts: float
    cat: str
    dur: float = 0.0
    tid: int | str | None = None
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        return self.ts + self.dur


@dataclass(frozen=True)
class PassTrace:
    """One pass in a trace; figures of one call in microseconds.

    Attributes:
        kernels: kernels or operators, longest first.
        span_us: from the start of a call's first kernel to the end of its last; None on a CPU.
        gap_us: the part of the span in which no kernel ran; None on a CPU.
    """

    kernels: tuple[ProfiledKernel, ...]
    time_us: float
    span_us: float | None = None
    gap_us: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Return the figures by name; none if nothing ran."""
        if not self.kernels:
            return {}
        values = {"kernel_time_us": self.time_us, "span_us": self.span_us, "gap_us": self.gap_us}
        if self.span_us is None:
            values = {"operator_time_us": self.time_us}
        return {name: value for name, value in values.items() if value is not None}


def read_trace(path: Path, device: str) -> dict[str, PassTrace]:
    """Return each pass of a trace: kernels if `device` is `cuda`, operators if it is `cpu`.

    Raises ValueError if it has none of our ranges.
    """
    used = (_RANGE, _OPERATOR, *_LAUNCHES, *_DEVICE)
    events = json.loads(path.read_bytes())["traceEvents"]
    whole = [msgspec.convert(one, _Event) for one in events if one.get("ph") == "X" and one.get("cat") in used]
    calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in whole:
        if event.cat == _RANGE and event.name.startswith(PREFIX):
            calls[event.name.removeprefix(PREFIX)].append((event.ts, event.end))
    if not calls:
        raise ValueError(f"{path} has no ranges named {PREFIX}...")
    # By the device, not by the trace's contents: operators must not replace kernels that CUPTI may not see.
    make = _kernels if device == "cuda" else _operators
    return {direction: make(direction, sorted(ranges), whole) for direction, ranges in calls.items()}


def _kernels(direction: str, ranges: Sequence[tuple[float, float]], events: Sequence[_Event]) -> PassTrace:
    """Assign kernels to a pass by their launch: the device may run them long after the range ended."""
    launched = {event.args.get("correlation"): event.ts for event in events if event.cat in _LAUNCHES}
    calls: dict[int, list[_Event]] = defaultdict(list)
    for event in events:
        if event.cat in _DEVICE:
            at = _inside(ranges, launched.get(event.args.get("correlation")))
            if at is not None:
                calls[at].append(event)
    by_name: dict[str, list[tuple[_Event, float | None]]] = defaultdict(list)
    spans, gaps = [], []
    for own in calls.values():
        own.sort(key=lambda event: event.ts)
        end: float | None = None
        idle = 0.0
        for event in own:
            gap: float | None = None if end is None else max(0.0, event.ts - end)
            idle += gap or 0.0
            by_name[event.name].append((event, gap))
            end = event.end if end is None else max(end, event.end)
        spans.append((end or 0.0) - own[0].ts)
        gaps.append(idle)
    total = sum(event.dur for own in calls.values() for event in own)
    kernels = [_row(direction, name, seen, len(ranges)) for name, seen in by_name.items()]
    kernels.sort(key=lambda kernel: -(kernel.time_us or 0.0))
    if not spans:
        return PassTrace((), 0.0, 0.0, 0.0)
    return PassTrace(tuple(kernels), total / len(ranges), fmean(spans), fmean(gaps))


def _row(direction: str, name: str, seen: Sequence[tuple[_Event, float | None]], calls: int) -> ProfiledKernel:
    time = sum(event.dur for event, _ in seen)
    figures: dict[str, float | str] = {}
    launches = [event.args for event, _ in seen]
    arguments = launches[0]
    for key, ours in _FIGURES.items():
        # Launches of different shapes have no common value.
        if any(launch.get(key) != arguments.get(key) for launch in launches):
            continue
        # Kineto reports an occupancy of 0 for kernels with more shared memory than the default: it is unknown.
        if key in arguments and not (ours == "occupancy_percent" and not arguments[key]):
            value = arguments[key]
            figures[ours] = "x".join(map(str, value)) if isinstance(value, list) else value
    gaps = [gap for _, gap in seen if gap is not None]
    if gaps:
        figures["gap_before_us"] = fmean(gaps)
    return ProfiledKernel(
        direction=direction, name=name, count=len(seen) / calls, time_us=time / calls, figures=figures
    )


def _operators(direction: str, ranges: Sequence[tuple[float, float]], events: Sequence[_Event]) -> PassTrace:
    """Return every operator with its own time, without that of the operators inside it."""
    own_us: dict[str, float] = defaultdict(float)
    whole_us: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    threads: dict[int | str | None, list[_Event]] = defaultdict(list)
    for event in events:
        if event.cat == _OPERATOR and _inside(ranges, event.ts) is not None:
            threads[event.tid].append(event)
    for own in threads.values():
        # An enclosing operator starts earlier, or at the same time and ends later.
        stack: list[_Event] = []
        for event in sorted(own, key=lambda event: (event.ts, -event.dur)):
            while stack and stack[-1].end <= event.ts:
                stack.pop()
            if stack:
                own_us[stack[-1].name] -= event.dur
            stack.append(event)
            own_us[event.name] += event.dur
            whole_us[event.name] += event.dur
            counts[event.name] += 1
    total, calls = sum(own_us.values()), len(ranges)
    kernels = [
        ProfiledKernel(
            direction=direction,
            name=name,
            count=counts[name] / calls,
            time_us=max(0.0, own_us[name]) / calls,
            figures={"total_us": whole_us[name] / calls},
        )
        for name in sorted(own_us, key=lambda name: -own_us[name])
    ]
    return PassTrace(tuple(kernels), total / calls)


def _inside(ranges: Sequence[tuple[float, float]], moment: float | None) -> int | None:
    """Return the index of the range that contains a moment; ranges are sorted and disjoint."""
    if moment is None:
        return None
    at = bisect.bisect_right(ranges, (moment, float("inf"))) - 1
    return at if at >= 0 and moment <= ranges[at][1] else None
