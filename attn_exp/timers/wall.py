"""Timers `wall` and `dispatch`: host time of single calls on an idle GPU, after a flush."""

import statistics

from attn_exp.timers.call import Call
from attn_exp.timers.event import flush_us
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost

_ESTIMATE_CALLS = 3


class WallTimer:
    """Host time from issuing a call until the GPU has finished it: the latency that a waiting caller sees."""

    name = "wall"
    estimates = False
    waits = True

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2

    def estimate(self, call: Call) -> Cost:
        """Estimate from 3 calls."""
        return Cost(statistics.median(self.block(call, _ESTIMATE_CALLS).times_us), flush_us(self.gpu, self.l2))

    def block(self, call: Call, calls: int) -> Block:
        """Time each call from an idle GPU."""
        times, last = [], None
        for _ in range(calls):
            last = None
            self.gpu.flush(self.l2)
            self.gpu.synchronize()
            began = self.gpu.now_us()
            last = call()
            if self.waits:
                self.gpu.synchronize()
            times.append(self.gpu.now_us() - began)
        self.gpu.synchronize()
        return Block(times, last=last)


class DispatchTimer(WallTimer):
    """Host time to issue a call without waiting for it: the cost in a launch-bound program."""

    name = "dispatch"
    waits = False
