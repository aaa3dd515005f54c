"""Timer `event`: a pair of CUDA events around each call, caches flushed before, the stream left unblocked.

What Triton's `do_bench` reports. Around a call that is shorter than its launch this times the host.
"""

import statistics
from typing import Any

from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Call, Cost


class EventTimer:
    """GPU time between two events around each call, host gaps included."""

    name = "event"
    estimates = False

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2

    def estimate(self, call: Call) -> Cost:
        """From 3 calls: their median, and the rest of their wall time as what lies around."""
        began = self.gpu.now_us()
        times = self.block(call, 3).times_us
        wall = (self.gpu.now_us() - began) / 3
        median = statistics.median(times)
        return Cost(median, max(0.0, wall - median))

    def block(self, call: Call, calls: int) -> Block:
        """Flush, event, call, event, and so on; one wait at the end."""
        pairs = enqueue(self.gpu, self.l2, call, calls)
        self.gpu.synchronize()
        return Block([self.gpu.elapsed_us(first, second) for first, second in pairs])


def enqueue(gpu: Gpu, l2: str, call: Call, calls: int) -> list[tuple[Any, Any]]:
    """Put `calls` times flush, event, call, event into the queue; the pairs of events."""
    pairs = []
    for _ in range(calls):
        gpu.flush(l2)
        first = gpu.event()
        call()
        pairs.append((first, gpu.event()))
    return pairs
