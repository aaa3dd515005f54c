"""Traces: what the GPU did in each call, by CUPTI, through PyTorch's profiler."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from attn_exp.core.record import Kernel, Traced
from attn_exp.timers.gpu import MARK, Gpu
from attn_exp.timers.kineto import silent_profile
from attn_exp.timers.timed_call import Call, TimedCall, as_timed

# Host activity that kineto reports as device activity (libkineto/src/CuptiActivity.cpp, syncTypeString).
_NOT_KERNELS = ("Context Sync", "Event Sync", "Stream Sync", "Stream Wait Event", "Activity Buffer Request")
_ATTEMPTS = 3
# A session's first hold, before it is known how long the host takes; later ones are longer by this factor than that,
# up to a limit, since a call that waits for the GPU also waits for the hold.
_FIRST_HOLD_US, _HOLD_FACTOR, _LONGEST_HOLD_US = 200.0, 1.5, 2000.0
# The marks of a call: it is held, it begins, it ends, the whole device is idle.
_MARKS = 4


@dataclass(frozen=True)
class Activity:
    """One activity of the device: its name, start in nanoseconds, duration in microseconds, and stream.

    Of an operator on a CPU, `stream` is its thread.
    """

    name: str
    start_ns: int
    time_us: float
    stream: int = 0

    @property
    def end_ns(self) -> float:
        """The end in nanoseconds."""
        return self.start_ns + 1e3 * self.time_us


@dataclass(frozen=True)
class TracedCall:
    """The activities of one call in time order, without what surrounds it.

    Attributes:
        activities: the activities, of all streams.
        left_behind_us: the time, as a union, in which its activities ran before the call's stream came to the call, or
            after that stream had left it behind.
        left_on: the numbers of the streams of those activities.
    """

    activities: tuple[Activity, ...]
    left_behind_us: float = 0.0
    left_on: tuple[int, ...] = ()

    @property
    def sum_us(self) -> float:
        """The sum of all durations in microseconds."""
        return sum(activity.time_us for activity in self.activities)

    @property
    def union_us(self) -> float:
        """The time in microseconds in which at least one activity ran."""
        return union_us((activity.start_ns, activity.end_ns) for activity in self.activities)

    @property
    def span_us(self) -> float:
        """The time in microseconds from the first start to the last end."""
        if not self.activities:
            return 0.0
        starts, ends = zip(*((activity.start_ns, activity.end_ns) for activity in self.activities), strict=True)
        return float(max(ends) - min(starts)) / 1e3

    @property
    def streams(self) -> tuple[int, ...]:
        """The numbers of the streams that worked, in order."""
        return tuple(sorted({activity.stream for activity in self.activities}))


@dataclass(frozen=True)
class Trace:
    """The activities of traced calls.

    Attributes:
        calls: the calls; none if records are missing, so that nothing can be assigned to calls.
        launches: how many kernels a call launches on average, approximate if lossy.
        loose: what was recorded of calls, if it cannot be assigned to them.
        loose_calls: of how many calls.
    """

    calls: tuple[TracedCall, ...]
    launches: float
    loose: tuple[Activity, ...] = ()
    loose_calls: int = 0

    @property
    def lossy(self) -> bool:
        """Whether records are missing."""
        return not self.calls

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of one call, longest first, with their mean count and mean time over the traced calls."""
        counts: Counter[str] = Counter()
        times: dict[str, float] = {}
        for activity in self._all():
            counts[activity.name] += 1
            times[activity.name] = times.get(activity.name, 0.0) + activity.time_us
        n = len(self.calls) or self.loose_calls
        kernels = [Kernel(name=name, count=counts[name] / n, time_us=times[name] / n) for name in counts]
        return tuple(sorted(kernels, key=lambda kernel: -kernel.time_us))

    def share(self, pattern: str) -> float:
        """Return the share of the time that activities whose name matches took, of that of all; 0.0 without any.

        On each stream the time is a union: operators on a CPU contain other ones, and are counted once.
        """
        matching = _busy_us(activity for activity in self._all() if re.search(pattern, activity.name))
        return matching / _busy_us(self._all()) if matching else 0.0

    def record(self) -> Traced | None:
        """Return the means of one call for the record; None if the activities could not be assigned to calls."""
        if self.lossy:
            return None
        n, calls = len(self.calls), self.calls
        ran = {tuple(sorted(activity.name for activity in call.activities)) for call in calls}
        return Traced(
            sum_us=sum(call.sum_us for call in calls) / n,
            union_us=sum(call.union_us for call in calls) / n,
            span_us=sum(call.span_us for call in calls) / n,
            streams=tuple(sorted(set[int]().union(*(call.streams for call in calls)))),
            left_behind_us=sum(call.left_behind_us for call in calls) / n,
            calls_differ=len(ran) > 1,
        )

    def _all(self) -> list[Activity]:
        return [*self.loose, *(activity for call in self.calls for activity in call.activities)]


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length in microseconds of the union of intervals (start, end) in nanoseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


def _busy_us(activities: Iterable[Activity]) -> float:
    by_stream = sorted(activities, key=lambda activity: activity.stream)
    return sum(
        union_us((activity.start_ns, activity.end_ns) for activity in group)
        for _, group in groupby(by_stream, key=lambda activity: activity.stream)
    )


def activities(run: Callable[[], None]) -> list[Activity]:
    """Return what the GPU did during `run`, in time order.

    It uses `torch.autograd.profiler.profile`: `torch.profiler.profile` imports all of Inductor for one flag, which
    takes 3 to 4 s in every worker (torch 2.11).
    """
    with silent_profile(use_cpu=False, use_device="cuda", use_kineto=True) as session:
        run()
        torch.cuda.synchronize()
    activities = [
        Activity(event.name(), event.start_ns(), event.duration_ns() / 1e3, event.device_resource_id())
        for event in session.kineto_results.events()
        if str(event.device_type()) == "DeviceType.CUDA" and event.name() not in _NOT_KERNELS
    ]
    return sorted(activities, key=lambda activity: activity.start_ns)


def trace(gpu: Gpu, l2: str, call: Call, calls: int) -> Trace:
    """Trace `calls` calls, each with new inputs and after a flush.

    A session that is lossy, has no kernel, or different ones in each call is repeated, up to three times in all: one
    lost record shows as any of these. What lossy ones recorded is kept without the kernels that also run without the
    call.
    """
    whole = None
    for _ in range(_ATTEMPTS):
        recorded = activities(lambda: _marked_calls(gpu, l2, call, calls))
        found = split_calls(recorded, calls)
        whole = whole if found.lossy else found
        if found.launches and (record := found.record()) and not record.calls_differ:
            return found
    if whole is not None:
        return whole
    around = {activity.name for activity in activities(lambda: _marked_calls(gpu, l2, _around(call), 1))}
    # If the profiler records nothing of what surely ran, its records are no evidence of anything.
    rest = tuple(activity for activity in recorded if activity.name not in around) if around else ()
    return Trace((), max(1.0, len(rest) / calls), rest, calls)


def _around(call: Call) -> Call:
    """Return the call without what it runs, but with its new inputs."""
    return TimedCall(lambda: None, as_timed(call).before)


def _marked_calls(gpu: Gpu, l2: str, call: Call, calls: int) -> None:
    """Run hold, flush, mark, call, mark, wait, mark, `calls` times.

    The hold keeps the stream busy until the call is enqueued. So the mark behind the call starts when the stream is
    done with the call, and not when the host has come to it; by then, work on other streams might be done.
    """
    timed, hold_us = as_timed(call), _FIRST_HOLD_US
    for _ in range(calls):
        timed.before()
        gpu.sleep_us(hold_us)
        began = gpu.now_us()
        gpu.flush(l2)
        gpu.mark()
        result = timed.run()
        gpu.mark()
        hold_us = min(_LONGEST_HOLD_US, _HOLD_FACTOR * (gpu.now_us() - began))
        gpu.synchronize()
        gpu.mark()
        timed.after(result)
        del result


def split_calls(recorded: Sequence[Activity], calls: int) -> Trace:
    """Split what was recorded into calls by their marks.

    To a call belongs what starts between the mark before it and the one behind the wait for the device, on whichever
    stream, and what other streams than the marks' did while the call was held: such a stream did not wait for the
    call's inputs. If there are more or fewer marks than expected, records are missing, and nothing can be assigned.
    """
    marks = [activity for activity in recorded if MARK in activity.name]
    others = [activity for activity in recorded if MARK not in activity.name]
    if len(marks) != _MARKS * calls:
        return Trace((), max(1.0, len(others) / calls - 1))
    found, done_ns = [], float("-inf")
    for _, begin, end, done in (marks[i : i + _MARKS] for i in range(0, len(marks), _MARKS)):
        ahead = [one for one in others if done_ns < one.start_ns < begin.start_ns and one.stream != begin.stream]
        inside = [one for one in others if begin.start_ns <= one.start_ns < done.start_ns]
        behind = [one for one in (*ahead, *inside) if one.end_ns > end.start_ns]
        outside_ns = [(one.start_ns, min(one.end_ns, begin.end_ns)) for one in ahead]
        outside_ns += [(max(one.start_ns, end.start_ns), one.end_ns) for one in behind]
        left_on = tuple(sorted({one.stream for one in (*ahead, *behind)}))
        found.append(TracedCall((*ahead, *inside), union_us(outside_ns), left_on))
        done_ns = done.start_ns
    return Trace(tuple(found), sum(len(one.activities) for one in found) / calls)
