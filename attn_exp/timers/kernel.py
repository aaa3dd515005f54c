"""Timer `kernel`: the sum of a call's kernel times by CUPTI, through PyTorch's profiler; also names the kernels.

What PyTorch's own attention benchmark reports. On a CPU, where there are no kernels, the same session names the
operators that ran.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile

from attn_exp.core.record import Kernel
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Call, Cost

# Host activity that kineto reports as if it ran on the device.
_NOT_KERNELS = ("Context Sync", "Event Sync", "Stream Sync", "Activity Buffer Request")


class ProfilerLost(Exception):
    """The profiler saw no kernels where some must have run: it says nothing about the call."""


@dataclass(frozen=True)
class Activity:
    """One thing the device did: its name, start in nanoseconds and duration in microseconds."""

    name: str
    start_ns: int
    time_us: float


@dataclass(frozen=True)
class Trace:
    """The activities of some calls, one tuple a call, in time order, and how many launches a call is.

    `lossy` if they could not be told apart: then there are no calls, and `launches` is about right.
    """

    calls: tuple[tuple[Activity, ...], ...]
    lossy: bool
    launches: float

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of one call, longest first: mean count and mean time over the traced calls."""
        counts: Counter[str] = Counter()
        times: Counter[str] = Counter()
        for call in self.calls:
            for activity in call:
                counts[activity.name] += 1
                times[activity.name] += activity.time_us  # type: ignore[assignment]
        n = len(self.calls)
        found = [Kernel(name=name, count=counts[name] / n, time_us=times[name] / n) for name in counts]
        return tuple(sorted(found, key=lambda kernel: -kernel.time_us))


def activities(run: Callable[[], None]) -> list[Activity]:
    """What the GPU did during `run`, in time order.

    `torch.autograd.profiler.profile`, not `torch.profiler.profile`: the latter imports all of Inductor for a flag of
    its own, 3 to 4 s in every worker (seen with torch 2.11).
    """
    with profile(use_cpu=False, use_device="cuda", use_kineto=True) as session:
        run()
        torch.cuda.synchronize()
    found = [
        Activity(event.name(), event.start_ns(), event.duration_ns() / 1e3)
        for event in session.kineto_results.events()
        if str(event.device_type()) == "DeviceType.CUDA" and event.name() not in _NOT_KERNELS
    ]
    return sorted(found, key=lambda activity: activity.start_ns)


def split_calls(found: list[Activity], calls: int) -> Trace:
    """Cut a session of `calls` times (flush, call) into calls, the flush left out.

    Every call ran the same kernels, so equal parts that each begin with the flush and name the same kernels are the
    calls; anything else means that CUPTI lost records, and nobody knows whose the others are. Flushes alone are calls
    that launched nothing.
    """
    size, rest = divmod(len(found), calls)
    parts = [tuple(found[i * size : (i + 1) * size]) for i in range(calls)] if size else []
    ran = {(part[0].name, *sorted(activity.name for activity in part[1:])) for part in parts}
    if rest or len(ran) != 1:
        return Trace((), True, max(1.0, len(found) / calls - 1))
    return Trace(tuple(part[1:] for part in parts), False, float(size - 1))


def trace(gpu: Gpu, l2: str, call: Call, calls: int) -> Trace:
    """Trace `calls` calls, each behind a flush. A lossy session, or one without a kernel, is tried once more."""

    def run() -> None:
        for _ in range(calls):
            gpu.flush(l2)
            call()

    first = split_calls(activities(run), calls)
    return split_calls(activities(run), calls) if first.lossy or not first.launches else first


def operators(call: Call) -> tuple[Kernel, ...]:
    """The ATen operators of one call on the CPU, all of them, longest first, nested ones included."""
    with profile(use_cpu=True, use_kineto=True) as session:
        call()
    counts: Counter[str] = Counter()
    times: dict[str, float] = {}
    for event in session.kineto_results.events():
        if event.name().startswith("aten::"):
            counts[event.name()] += 1
            times[event.name()] = times.get(event.name(), 0.0) + event.duration_ns() / 1e3
    ranked = sorted(counts, key=lambda name: -times[name])
    return tuple(Kernel(name=name, count=float(counts[name]), time_us=times[name]) for name in ranked)


class KernelTimer:
    """The sum of the kernel times of each call, cold L2; a profiler session a block."""

    name = "kernel"
    estimates = False

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2

    def estimate(self, call: Call) -> Cost:
        """From one session of 3 calls."""
        traced = trace(self.gpu, self.l2, call, 3)
        return Cost(statistics.median(_sums(traced)), 30.0, traced.launches)

    def block(self, call: Call, calls: int) -> Block:
        """One session; no samples can be had from a lossy one, so it is an error there."""
        return Block(_sums(trace(self.gpu, self.l2, call, calls)))


def _sums(traced: Trace) -> list[float]:
    if traced.lossy and traced.launches > 1:
        raise ProfilerLost("the profiler lost kernel records, or calls differ in what they run: set timer=device")
    sums = [sum(activity.time_us for activity in call) for call in traced.calls]
    if not sums or not all(sums):
        raise ProfilerLost("the profiler saw no kernels: is CUPTI allowed to trace on this machine?")
    return sums
