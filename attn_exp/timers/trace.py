"""Traces: what the GPU did in each call, by CUPTI, through PyTorch's profiler."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch.autograd.profiler import profile

from attn_exp.core.record.record import Kernel, Traced
from attn_exp.timers.call import Call
from attn_exp.timers.gpu import MARK, Gpu

# Host activity that kineto reports as device activity (libkineto/src/CuptiActivity.cpp, syncTypeString).
_NOT_KERNELS = ("Context Sync", "Event Sync", "Stream Sync", "Stream Wait Event", "Activity Buffer Request")
_ATTEMPTS = 3
# A session's first hold, before the host's time is known. Later ones are longer than that time by this factor, up to a
# limit, since a call that waits for the GPU also waits for the hold.
_FIRST_HOLD_US, _HOLD_FACTOR, _LONGEST_HOLD_US = 200.0, 1.5, 2000.0
# The marks of a call: it is held, it begins, it ends, the whole device is idle. Calls in a row have two of these.
_MARKS, _MARKS_IN_A_ROW = 4, 2


@dataclass(frozen=True)
class Activity:
    """One activity of the device: its name, start in nanoseconds, duration in microseconds, and stream.

    For an operator on a CPU, `stream` is its thread.
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
    """The activities of one call in time order, without those around it.

    Attributes:
        activities: the activities, of all streams.
        left_behind_us: the time, as a union, in which its activities ran before the call's stream reached the call, or
            after it had left it.
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
        loose: recorded activities that cannot be assigned to calls.
        loose_calls: the number of their calls.
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

    def share(self, pattern: str, apart: str | None = None) -> float:
        """Return the share of the time that activities whose name matches took, of that of all; 0.0 without any.

        Those whose name matches `apart` do not count.

        On each stream the time is a union: operators on a CPU contain other ones, and are counted once.
        """
        counted = [one for one in self._all() if apart is None or not re.search(apart, one.name)]
        matching = _busy_us(activity for activity in counted if re.search(pattern, activity.name))
        return matching / _busy_us(counted) if matching else 0.0

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


def trace(
    gpu: Gpu,
    l2: str,
    call: Call,
    calls: int,
    *,
    warm_up: int = 0,
    waits: bool = True,
    between: Callable[[int], None] = lambda index: None,
) -> Trace:
    """Trace `calls` calls, each after a flush; `between` is called with the index of each before it.

    A session that is lossy, has no kernel, or different ones in each call is repeated, up to three times in all. One
    lost record shows as any of these. Records of lossy sessions are kept without the kernels that also run without the
    call.

    Records of `warm_up` calls before them are dropped. Without `waits` calls are not waited for: work that other
    streams do after the call's stream has finished is not seen.
    """
    whole = None
    for _ in range(_ATTEMPTS):
        recorded = activities(lambda: _marked_calls(gpu, l2, call, warm_up + calls, between, waits=waits))
        found = split_calls(recorded, warm_up + calls, marks_of_call=_MARKS if waits else _MARKS_IN_A_ROW)
        found = replace(found, calls=found.calls[warm_up:])
        whole = whole if found.lossy else found
        if found.launches and (record := found.record()) and not record.calls_differ:
            return found
    if whole is not None:
        return whole
    around = {activity.name for activity in activities(lambda: _marked_calls(gpu, l2, lambda: None, 1, between))}
    # If the profiler records nothing of what surely ran, its records are no evidence of anything.
    rest = tuple(activity for activity in recorded if activity.name not in around) if around else ()
    return Trace((), max(1.0, len(rest) / calls), rest, calls)


def _marked_calls(
    gpu: Gpu, l2: str, call: Call, calls: int, between: Callable[[int], None], *, waits: bool = True
) -> None:
    """Run hold, flush, mark, call, mark, wait, mark, `calls` times; for calls in a row only flush, mark, call, mark.

    The hold keeps the stream busy until the call is enqueued. So the mark behind the call starts when the stream is
    done with the call. If the host issued it later, work on other streams might be done by then.
    """
    hold_us = _FIRST_HOLD_US
    for index in range(calls):
        between(index)
        if waits:
            gpu.sleep_us(hold_us)
        began = gpu.now_us()
        gpu.flush(l2)
        gpu.mark()
        result = call()
        gpu.mark()
        del result
        if waits:
            hold_us = min(_LONGEST_HOLD_US, _HOLD_FACTOR * (gpu.now_us() - began))
            gpu.synchronize()
            gpu.mark()


def split_calls(recorded: Sequence[Activity], calls: int, *, marks_of_call: int = _MARKS) -> Trace:
    """Split recorded activities into calls by their marks.

    A call has the activities that start between the mark before it and the one behind the wait for the device. It also
    has those of other streams than the marks' while it was held: such a stream did not wait for the call's inputs.
    Calls in a row end with their second mark. If there are more or fewer marks than expected, records are missing, and
    nothing can be assigned.
    """
    marks = [activity for activity in recorded if MARK in activity.name]
    others = [activity for activity in recorded if MARK not in activity.name]
    if len(marks) != marks_of_call * calls:
        return Trace((), max(1.0, len(others) / calls - 1))
    found, done_ns = [], float("-inf")
    for several in (marks[i : i + marks_of_call] for i in range(0, len(marks), marks_of_call)):
        begin, end = several[-3:-1] if marks_of_call == _MARKS else several
        done = several[-1]
        ahead = [one for one in others if done_ns < one.start_ns < begin.start_ns and one.stream != begin.stream]
        inside = [one for one in others if begin.start_ns <= one.start_ns < done.start_ns]
        behind = [one for one in (*ahead, *inside) if one.end_ns > end.start_ns]
        outside_ns = [(one.start_ns, min(one.end_ns, begin.end_ns)) for one in ahead]
        outside_ns += [(max(one.start_ns, end.start_ns), one.end_ns) for one in behind]
        left_on = tuple(sorted({one.stream for one in (*ahead, *behind)}))
        found.append(TracedCall((*ahead, *inside), union_us(outside_ns), left_on))
        done_ns = done.start_ns
    return Trace(tuple(found), sum(len(one.activities) for one in found) / calls)


# Kineto reads it when a process traces for the first time. At 5 torch 2.13 still writes two lines a trace (USDT).
_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


def silent_profile(**options: Any) -> profile:
    """Return `torch.autograd.profiler.profile(**options)`, which writes nothing unless KINETO_LOG_LEVEL says so."""
    os.environ.setdefault(_LEVEL, _SILENT)
    return profile(**options)


def operators(call: Call) -> Trace:
    """Return all ATen operators of one call on the CPU, nested ones included, as a trace of one call."""
    with silent_profile(use_cpu=True, use_kineto=True) as session:
        call()
    ran = [
        Activity(event.name(), event.start_ns(), event.duration_ns() / 1e3, event.start_thread_id())
        for event in session.kineto_results.events()
        if event.name().startswith("aten::")
    ]
    return Trace((TracedCall(tuple(sorted(ran, key=lambda activity: activity.start_ns))),), float(len(ran)))
