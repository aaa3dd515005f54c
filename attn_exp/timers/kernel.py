"""Timer `kernel`: the sum of a call's kernel times by CUPTI, through PyTorch's profiler.

It reports what PyTorch's own attention benchmark reports.
"""

import statistics

from attn_exp.core.limits import UNION_NOTE
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost
from attn_exp.timers.timed_call import Call
from attn_exp.timers.trace import Trace, trace

# The wall time around a call in microseconds: flush, hold, and the wait for the device.
_AROUND_US = 200.0


class ProfilerLost(Exception):
    """The profiler recorded no kernels where some must have run, so nothing is known about the call."""


class KernelTimer:
    """The sum of each call's kernel times, with cold L2; one profiler session for each block."""

    name = "kernel"
    estimates = False

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2

    def estimate(self, call: Call) -> Cost:
        """Estimate from one session of 3 calls."""
        traced = trace(self.gpu, self.l2, call, 3)
        return Cost(statistics.median(_sums(traced)), _AROUND_US, traced.launches)

    def block(self, call: Call, calls: int) -> Block:
        """Time a block in one session; its notes are medians over the calls.

        Raises:
            ProfilerLost: records are missing, so there are no samples.
        """
        traced = trace(self.gpu, self.l2, call, calls)
        sums = _sums(traced)
        notes = {
            UNION_NOTE: statistics.median(one.union_us for one in traced.calls),
            "span_us": statistics.median(one.span_us for one in traced.calls),
            "streams": float(max(len(one.streams) for one in traced.calls)),
        }
        return Block(sums, notes=notes)


def _sums(traced: Trace) -> list[float]:
    if traced.lossy and traced.loose:
        raise ProfilerLost("the profiler lost kernel records: set timer=device")
    sums = [call.sum_us for call in traced.calls]
    if not sums or not all(sums):
        raise ProfilerLost("the profiler saw no kernels: is CUPTI allowed to trace on this machine?")
    return sums
