"""Timer `device`, the default on a GPU: GPU time of a call with cold L2 and without host gaps.

It measures as `event` does, but the stream is held first for as long as the host needs to stay ahead. The GPU then runs
call after call without waiting for Python. A block in which the host was late all the same is measured again.
"""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attn_exp.timers.call import Call
from attn_exp.timers.event import Pairs, flush_us, times_us
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost

MARGIN = 1.5
# After a rest the host enqueues the first calls more slowly than later ones.
LEAST_HOLD_US = 200.0
# By so many calls the host is ahead before a block begins.
_AHEAD = 4
# How often a late block is measured again, with twice the hold each time.
REPEATS = 3
ESTIMATE_CALLS, _ESTIMATES = 5, 3
# Unblocked, a launch-bound call seems as long as its launch. A call that takes this many times as long is not
# launch-bound.
CLEARLY = 4.0
# The host's time a call is the least of so many blocks: a hiccup of the host makes no later block wait.
_REMEMBERED = 3


class DeviceTimer:
    """GPU time of a call, with the stream held until the host is so far ahead that it stays ahead."""

    name = "device"
    estimates = True

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2
        # The host's time to enqueue a call in the last blocks, and the GPU's to run it with its flush.
        self._enqueue_us = deque[float](maxlen=_REMEMBERED)
        self._run_us = 0.0

    def estimate(self, call: Call) -> Cost:
        """Estimate from one call if it clearly outlasts its launch, else from blocks of a few.

        The cost is the GPU's alone. The host's time decides only for how long the stream is held.
        """
        self.gpu.synchronize()
        self._run_us = 0.0
        began = self.gpu.now_us()
        pairs = self._enqueue(call, 1).pairs
        self._enqueue_us.append(self.gpu.now_us() - began)
        (time_us,) = times_us(self.gpu, pairs)
        around_us = flush_us(self.gpu, self.l2)
        if time_us < CLEARLY * MARGIN * self._enqueue_us[-1]:
            for _ in range(_ESTIMATES):
                time_us = statistics.median(self.block(call, ESTIMATE_CALLS).times_us)
        self._run_us = time_us + around_us
        return Cost(time_us, around_us)

    @property
    def host_bound(self) -> bool:
        """Whether enqueueing a call takes about as long as running it, so that blocks are held for it."""
        return MARGIN * min(self._enqueue_us, default=0.0) > self._run_us

    def enqueue(self, call: Call, calls: int) -> Callable[[], Block]:
        """Enqueue a block behind what is in the queue; return what waits for it. A late one is measured again."""
        ahead = self._enqueue(call, calls)
        if ahead.late:
            late_us = _without_gaps(times_us(self.gpu, ahead.pairs))
            block = self.block(call, calls)
            block.repeated_us += late_us
            block.last = None
            return lambda: block
        return lambda: self._block(ahead)

    def block(self, call: Call, calls: int) -> Block:
        """Time a block; one in which the host was late is repeated, each time with twice the hold."""
        length_us, late_us = self._hold_us(calls), 0.0
        for _ in range(REPEATS + 1):
            block = Block([])
            # A sleep, which unlike an event that waits for the host cannot deadlock.
            self.gpu.sleep_us(length_us)
            began = self.gpu.now_us()
            enqueued = self._enqueue(call, calls)
            took_us = (self.gpu.now_us() - began) / calls
            block = self._block(enqueued)
            block.last, block.repeated_us, enqueued.last = enqueued.last, late_us, None
            if not enqueued.late:
                self._enqueue_us.append(took_us)
                return block
            length_us, late_us = 2 * length_us, late_us + _without_gaps(block.times_us)
        # A call that synchronises with the GPU; its wait is no time to enqueue.
        block.flags = ("unblocked",)
        return block

    def _enqueue(self, call: Call, calls: int) -> "_Enqueued":
        """Enqueue as `event.enqueue`, with stamps around, and see whether the stream came to a call too early."""
        block = _Enqueued(self.gpu.stamp())
        for _ in range(calls):
            block.last = None
            self.gpu.flush(self.l2)
            first = self.gpu.event()
            block.last = call()
            block.pairs.append((first, self.gpu.event()))
            # Not of the first one: the host is slow after a rest, and a block's first call is not timed.
            block.late = block.late or (len(block.pairs) > 1 and self.gpu.passed(first))
        block.end, block.passed = self.gpu.stamp(), self.gpu.event()
        return block

    def _block(self, enqueued: "_Enqueued") -> Block:
        """Wait for a block, and return its times and clock."""
        times = times_us(self.gpu, enqueued.pairs)
        self.gpu.wait(enqueued.passed)
        return Block(times, span=self.gpu.span(enqueued.begin, enqueued.end))

    def _hold_us(self, calls: int) -> float:
        """Return for how long to hold the stream before a block: what the host is slower by in all of its calls."""
        enqueue_us = min(self._enqueue_us, default=0.0)
        behind_us = (calls - 1) * max(0.0, enqueue_us - self._run_us / MARGIN)
        return LEAST_HOLD_US + MARGIN * (min(calls, _AHEAD) * enqueue_us + behind_us)


def _without_gaps(times: list[float]) -> float:
    """Return for how long the GPU ran calls in one of which the host was late: its gap is no load."""
    return len(times) * statistics.median(times)


@dataclass
class _Enqueued:
    """A block in the queue: stamps around it, an event behind it, the events of each call, and the last result.

    `late` says that the stream came to a call before that was enqueued: the host's gap may be in its time.
    """

    begin: Any
    end: Any = None
    passed: Any = None
    pairs: Pairs = field(default_factory=list)
    last: Any = None
    late: bool = False
