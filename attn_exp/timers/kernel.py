"""Timer `kernel`: the sum of a call's kernel times by CUPTI, through PyTorch's profiler.

It reports what PyTorch's own attention benchmark reports. A long call is not waited for before the next one, so that
the GPU does not rest between them.
"""

import statistics

from attn_exp.core.record.limits import UNION_NOTE
from attn_exp.core.record.record import Timing
from attn_exp.timers.call import Call
from attn_exp.timers.event import flush_us
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost, timing_of
from attn_exp.timers.trace import Trace, trace

# From this length on the GPU would rest if each call were waited for.
LONG_US = 1_000.0
# A session begins with so much of the call, since opening the profiler rests the GPU.
_WARM_US = 60_000.0


class ProfilerLost(Exception):
    """The profiler recorded no kernels where some must have run, so nothing is known about the call."""


class KernelTimer:
    """The sum of each call's kernel times, with cold L2; one profiler session for each block."""

    name = "kernel"
    estimates = False

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2
        # The time of a call where it is known, in microseconds.
        self.call_us = 0.0

    def estimate(self, call: Call) -> Cost:
        """Estimate from one session of 3 calls."""
        traced = trace(self.gpu, self.l2, call, 3)
        self.call_us = statistics.median(_sums(traced))
        return Cost(self.call_us, flush_us(self.gpu, self.l2), traced.launches)

    def block(self, call: Call, calls: int) -> Block:
        """Time a block in one session; its notes are medians over the calls.

        Raises:
            ProfilerLost: records are missing, so there are no samples.
        """
        long = self.call_us >= LONG_US
        warm = max(1, round(_WARM_US / self.call_us)) if long else 0
        traced = trace(self.gpu, self.l2, call, calls, warm_up=warm, waits=not long)
        return _block(traced)


def block_of(traced: Trace, l2: str) -> Timing:
    """Return calls that were traced as a block of this timer."""
    return timing_of(KernelTimer.name, l2, _block(traced))


def _block(traced: Trace) -> Block:
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
