"""Timer `cpu`: host time of a call on the CPU, in loops so that a sample lasts at least 1 ms."""

import itertools
import math
from time import perf_counter_ns
from typing import Any

from attn_exp.timers.call import Call
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost

SAMPLE_US = 1_000.0


class CpuTimer:
    """`perf_counter_ns` around enough calls to fill a millisecond; the calls leave the caches warm."""

    name = "cpu"
    l2 = "warm"
    estimates = True

    def __init__(self, gpu: Gpu | None = None, l2: str = "warm") -> None:
        self.loops = 1

    def estimate(self, call: Call) -> Cost:
        """Return the time of the faster of 2 calls, and set how many calls make a sample."""
        time_us = min(_looped_us(call, 1)[0] for _ in range(2))
        self.loops = max(1, math.ceil(SAMPLE_US / time_us))
        # The first calls may be slow, which makes the first estimate of the loop count too small.
        while (looped_us := _looped_us(call, self.loops)[0]) < SAMPLE_US:
            self.loops = math.ceil(self.loops * min(2.0, 1.1 * SAMPLE_US / looped_us))
        return Cost(time_us * self.loops)

    def block(self, call: Call, calls: int) -> Block:
        """Return `calls` samples, each the mean of one loop."""
        times_us, last = [], None
        for _ in range(calls):
            last = None
            looped_us, last = _looped_us(call, self.loops)
            times_us.append(looped_us / self.loops)
        return Block(times_us, notes={"calls_per_sample": float(self.loops)}, last=last)


def _looped_us(call: Call, loops: int) -> tuple[float, Any]:
    """Return the time of so many calls, and what the last one returned."""
    last = None
    began = perf_counter_ns()
    for _ in itertools.repeat(None, loops):
        last = None
        last = call()
    return (perf_counter_ns() - began) / 1e3, last
