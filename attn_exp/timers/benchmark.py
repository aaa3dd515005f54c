"""Timer `benchmark`: PyTorch's `torch.utils.benchmark.Timer`, the second timer of its own attention benchmark.

That script (benchmarks/transformer/sdpa.py) makes 5 calls and reports the median of `adaptive_autorange`. That is the
host's time of many calls in a row, with one wait for the GPU at the end, so that caches are warm.
"""

from time import perf_counter
from typing import Any

import torch

from attn_exp.timers.call import Call
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost

WARM_UP_CALLS = 5
# As in the script.
MIN_RUN_S = 0.1
# The default of 10 s took 57 s beside four busy processes: it sorts all samples, 12,659 then, after each of them.
MAX_RUN_S = 1.0


class BenchmarkTimer:
    """Host time of calls in a row, until the device has finished them; `adaptive_autorange` chooses how many."""

    name = "benchmark"
    l2 = "warm"
    estimates = True

    def __init__(self, gpu: Gpu | None = None, l2: str = "warm") -> None:
        self.gpu = gpu
        self.loops = 1
        self._median_us = 0.0

    def estimate(self, call: Call) -> Cost:
        """Make 5 calls, and let `adaptive_autorange` choose how many calls make a sample."""
        # It imports PyTorch's C++ extensions, which no other timer needs.
        from torch.utils.benchmark import Timer

        for _ in range(WARM_UP_CALLS):
            call()
        # Its default would be one thread.
        timer = Timer("call()", globals={"call": call}, timer=self._now_s, num_threads=torch.get_num_threads())
        measured = timer.adaptive_autorange(min_run_time=MIN_RUN_S, max_run_time=MAX_RUN_S)
        self.loops, self._median_us = measured.number_per_run, measured.median * 1e6
        return Cost(self._median_us * self.loops)

    def block(self, call: Call, calls: int) -> Block:
        """Return `calls` samples, each the mean of one loop of calls."""
        times_us, last = [], None
        for _ in range(calls):
            last = None
            sample_us, last = self._sample_us(call)
            times_us.append(sample_us)
        notes = {"calls_per_sample": float(self.loops), "autorange_us": self._median_us}
        return Block(times_us, notes=notes, last=last)

    def _sample_us(self, call: Call) -> tuple[float, Any]:
        last = None
        began = self._now_s()
        for _ in range(self.loops):
            last = None
            last = call()
        return (self._now_s() - began) / self.loops * 1e6, last

    def _now_s(self) -> float:
        if self.gpu is None:
            return perf_counter()
        self.gpu.synchronize()
        return self.gpu.now_us() / 1e6
