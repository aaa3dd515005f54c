"""Timer `kernel`: the sum of a call's kernel times by CUPTI, through PyTorch's profiler.

It also names the kernels.

It reports what PyTorch's own attention benchmark reports. On a CPU the same profiler names the operators that ran.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile

from attn_exp.core.record import Kernel
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost
from attn_exp.timers.timed_call import Call

# Host activity that kineto reports as device activity.
_NOT_KERNELS = ("Context Sync", "Event Sync", "Stream Sync", "Activity Buffer Request")


class ProfilerLost(Exception):
    """The profiler recorded no kernels where some must have run, so nothing is known about the call."""


@dataclass(frozen=True)
class Activity:
    """One activity of the device: its name, start in nanoseconds and duration in microseconds."""

    name: str
    start_ns: int
    time_us: float


@dataclass(frozen=True)
class Trace:
    """The activities of traced calls.

    Attributes:
        calls: the activities of each call, in time order.
        lossy: whether records are missing, so that the activities cannot be assigned to calls; `calls` is then empty.
        launches: how many kernels a call launches, approximate if lossy.
    """

    calls: tuple[tuple[Activity, ...], ...]
    lossy: bool
    launches: float

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of one call, longest first, with their mean count and mean time over the traced calls."""
        counts: Counter[str] = Counter()
        times: Counter[str] = Counter()
        for call in self.calls:
            for activity in call:
                counts[activity.name] += 1
                times[activity.name] += activity.time_us  # type: ignore[assignment]
        n = len(self.calls)
        kernels = [Kernel(name=name, count=counts[name] / n, time_us=times[name] / n) for name in counts]
        return tuple(sorted(kernels, key=lambda kernel: -kernel.time_us))


def activities(run: Callable[[], None]) -> list[Activity]:
    """Return what the GPU did during `run`, in time order.

    It uses `torch.autograd.profiler.profile`: `torch.profiler.profile` imports all of Inductor for one flag, which
    takes 3 to 4 s in every worker (torch 2.11).
    """
    with profile(use_cpu=False, use_device="cuda", use_kineto=True) as session:
        run()
        torch.cuda.synchronize()
    activities = [
        Activity(event.name(), event.start_ns(), event.duration_ns() / 1e3)
        for event in session.kineto_results.events()
        if str(event.device_type()) == "DeviceType.CUDA" and event.name() not in _NOT_KERNELS
    ]
    return sorted(activities, key=lambda activity: activity.start_ns)


def split_calls(recorded: list[Activity], calls: int) -> Trace:
    """Split the activities of `calls` times (flush, call) into calls, without the flush.

    Every call runs the same kernels, so equal parts that begin with the flush and have the same kernel names are the
    calls. Anything else means that CUPTI lost records, and the rest cannot be assigned. Flushes without kernels are
    calls that launched nothing.
    """
    size, rest = divmod(len(recorded), calls)
    parts = [tuple(recorded[i * size : (i + 1) * size]) for i in range(calls)] if size else []
    ran = {(part[0].name, *sorted(activity.name for activity in part[1:])) for part in parts}
    if rest or len(ran) != 1:
        return Trace((), True, max(1.0, len(recorded) / calls - 1))
    return Trace(tuple(part[1:] for part in parts), False, float(size - 1))


def trace(gpu: Gpu, l2: str, call: Call, calls: int) -> Trace:
    """Trace `calls` calls, each after a flush.

    A session that is lossy or has no kernel is repeated once.
    """

    def run() -> None:
        for _ in range(calls):
            gpu.flush(l2)
            call()

    first = split_calls(activities(run), calls)
    return split_calls(activities(run), calls) if first.lossy or not first.launches else first


def operators(call: Call) -> tuple[Kernel, ...]:
    """Return all ATen operators of one call on the CPU, nested ones included, longest first."""
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
    """The sum of each call's kernel times, with cold L2; one profiler session for each block."""

    name = "kernel"
    estimates = False

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2

    def estimate(self, call: Call) -> Cost:
        """Estimate from one session of 3 calls."""
        traced = trace(self.gpu, self.l2, call, 3)
        return Cost(statistics.median(_sums(traced)), 30.0, traced.launches)

    def block(self, call: Call, calls: int) -> Block:
        """Time a block in one session.

        Raises:
            ProfilerLost: records are missing, so there are no samples.
        """
        return Block(_sums(trace(self.gpu, self.l2, call, calls)))


def _sums(traced: Trace) -> list[float]:
    if traced.lossy and traced.launches > 1:
        raise ProfilerLost("the profiler lost kernel records, or calls differ in what they run: set timer=device")
    sums = [sum(activity.time_us for activity in call) for call in traced.calls]
    if not sums or not all(sums):
        raise ProfilerLost("the profiler saw no kernels: is CUPTI allowed to trace on this machine?")
    return sums
