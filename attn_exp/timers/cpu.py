"""Timer `cpu`: host time of a call on the CPU, in loops so that a sample lasts at least 1 ms."""

import math
import time

from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Call, Cost

SAMPLE_US = 1_000.0


class CpuTimer:
    """`perf_counter_ns` around enough calls to fill a millisecond; the calls leave the caches warm."""

    name = "cpu"
    l2 = "warm"
    estimates = True

    def __init__(self, gpu: Gpu | None = None, l2: str = "warm") -> None:
        self._loops = 1

    def estimate(self, call: Call) -> Cost:
        """Return the time of the faster of 2 calls, and set how many calls make a sample."""
        time_us = min(_time_us(call, 1) for _ in range(2))
        self._loops = max(1, math.ceil(SAMPLE_US / time_us))
        # The first calls may be slow, which makes the first estimate of the loop count too small.
        while (looped_us := _time_us(call, self._loops) * self._loops) < SAMPLE_US:
            self._loops = math.ceil(self._loops * min(2.0, 1.1 * SAMPLE_US / looped_us))
        return Cost(time_us * self._loops)

    def block(self, call: Call, calls: int) -> Block:
        """Return `calls` samples, each the mean of one loop."""
        return Block([_time_us(call, self._loops) for _ in range(calls)])


def _time_us(call: Call, loops: int) -> float:
    began = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return (time.perf_counter_ns() - began) / loops / 1e3
