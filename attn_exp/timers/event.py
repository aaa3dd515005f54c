"""Timer `event`: a pair of CUDA events around each call, with flushed caches and an unblocked stream.

It reports what Triton's `do_bench` reports. For a call that is shorter than its launch it measures the host.
"""

import statistics
from typing import Any

from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost
from attn_exp.timers.timed_call import Call, as_timed


class EventTimer:
    """GPU time between two events around each call, host gaps included."""

    name = "event"
    estimates = False

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2

    def estimate(self, call: Call) -> Cost:
        """Estimate from 3 calls: their median, and the rest of their wall time as the time around a call."""
        began = self.gpu.now_us()
        times = self.block(call, 3).times_us
        wall = (self.gpu.now_us() - began) / 3
        median = statistics.median(times)
        return Cost(median, max(0.0, wall - median))

    def block(self, call: Call, calls: int) -> Block:
        """Enqueue flush, event, call, event for each call, then wait once."""
        pairs = enqueue(self.gpu, self.l2, call, calls)
        self.gpu.synchronize()
        return Block([self.gpu.elapsed_us(first, second) for first, second in pairs])


def enqueue(gpu: Gpu, l2: str, call: Call, calls: int) -> list[tuple[Any, Any]]:
    """Enqueue new inputs, flush, event, call, event `calls` times; return the pairs of events."""
    timed, pairs = as_timed(call), []
    for _ in range(calls):
        timed.before()
        gpu.flush(l2)
        first = gpu.event()
        result = timed.run()
        pairs.append((first, gpu.event()))
        timed.after(result)
        # Before the next call, which may then reuse the result's memory, as it would in a loop that drops results.
        del result
    return pairs
