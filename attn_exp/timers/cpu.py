"""Timer `cpu`: host time of a call on the CPU, in loops so that a sample lasts at least 1 ms."""

import math
from time import perf_counter_ns

from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost
from attn_exp.timers.timed_call import Call, TimedCall, as_timed

SAMPLE_US = 1_000.0


class CpuTimer:
    """`perf_counter_ns` around each of enough calls to fill a millisecond; the calls leave the caches warm."""

    name = "cpu"
    l2 = "warm"
    estimates = True

    def __init__(self, gpu: Gpu | None = None, l2: str = "warm") -> None:
        self.loops = 1

    def estimate(self, call: Call) -> Cost:
        """Return the time of the faster of 2 calls, and set how many calls make a sample."""
        timed = as_timed(call)
        time_us = min(_times_us(timed, 1)[0] for _ in range(2))
        self.loops = max(1, math.ceil(SAMPLE_US / time_us))
        # The first calls may be slow, which makes the first estimate of the loop count too small.
        began = perf_counter_ns()
        while (looped_us := sum(_times_us(timed, self.loops))) < SAMPLE_US:
            self.loops = math.ceil(self.loops * min(2.0, 1.1 * SAMPLE_US / looped_us))
            began = perf_counter_ns()
        around_us = (perf_counter_ns() - began) / 1e3 - looped_us
        return Cost(time_us * self.loops, max(0.0, around_us))

    def block(self, call: Call, calls: int) -> Block:
        """Return `calls` samples, each the mean of one loop."""
        timed = as_timed(call)
        times_us = [sum(_times_us(timed, self.loops)) / self.loops for _ in range(calls)]
        return Block(times_us, notes={"calls_per_sample": float(self.loops)})


def _times_us(timed: TimedCall, loops: int) -> list[float]:
    """Return the time of each of `loops` calls. The clock stands still while the inputs of the next one are made."""
    times = []
    for _ in range(loops):
        timed.before()
        began = perf_counter_ns()
        result = timed.run()
        times.append((perf_counter_ns() - began) / 1e3)
        timed.after(result)
        del result
    return times
