"""Timers `wall` and `dispatch`: the host's share. Both after a flush, each call by itself on an idle GPU."""

import statistics

from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Call, Cost

_ESTIMATE_CALLS = 3


class WallTimer:
    """Host time from issuing a call until the GPU is done with it: the latency that a caller who waits sees."""

    name = "wall"
    estimates = False
    waits = True

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2

    def estimate(self, call: Call) -> Cost:
        """From 3 calls: their median, and what lies around them."""
        began = self.gpu.now_us()
        median = statistics.median(self.block(call, _ESTIMATE_CALLS).times_us)
        return Cost(median, max(0.0, (self.gpu.now_us() - began) / _ESTIMATE_CALLS - median))

    def block(self, call: Call, calls: int) -> Block:
        """Time each call from an idle GPU."""
        times = []
        for _ in range(calls):
            self.gpu.flush(self.l2)
            self.gpu.synchronize()
            began = self.gpu.now_us()
            call()
            if self.waits:
                self.gpu.synchronize()
            times.append(self.gpu.now_us() - began)
        self.gpu.synchronize()
        return Block(times)


class DispatchTimer(WallTimer):
    """Host time to issue a call, without waiting for it: what a launch-bound program pays."""

    name = "dispatch"
    waits = False
