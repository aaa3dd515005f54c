"""Timer `device`, the default on a GPU: GPU time of a call with cold L2 and without host gaps.

It measures as `event` does. If issuing calls takes longer than running them, a blocker also holds the stream until the
whole block is enqueued. The GPU then runs call after call without waiting for Python.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

from attn_exp.timers.call import Call
from attn_exp.timers.event import Pairs, enqueue, flush_us, times_us
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost

MARGIN = 1.5
DOUBLINGS = 2


ESTIMATE_CALLS, _TRIES = 5, 8
# Unblocked, a launch-bound call seems as long as its launch. A call that takes this many times as long is not
# launch-bound.
CLEARLY = 4.0
# By so much the host must be ahead of the GPU.
_AHEAD = 1.2


class DeviceTimer:
    """GPU time of a call, with the stream blocked first if enqueueing is slower than running."""

    name = "device"
    estimates = True

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2
        self.blocked = False
        # Whether a call does not clearly outlast its launch: the host may fall behind.
        self._close = False
        # How long the host takes to enqueue a call: a running estimate, and in the last block.
        self._estimate_us = self._enqueue_us = 0.0
        self._newest: Any = None

    def estimate(self, call: Call) -> Cost:
        """Estimate from one call if it clearly outlasts its launch, else from a few behind a blocker.

        The cost is the GPU's alone. The host's time decides only whether blocks need a blocker.
        """
        self.gpu.synchronize()
        began = self.gpu.now_us()
        _, pairs = enqueue(self.gpu, self.l2, call, 1)
        self._estimate_us = self.gpu.now_us() - began
        (time_us,) = times_us(self.gpu, pairs)
        around_us = flush_us(self.gpu, self.l2)
        self.blocked = self._close = time_us < CLEARLY * self._hold_us(1)
        if self.blocked:
            # At least twice, since the host issues the first calls more slowly than later ones; other threads may hold
            # it up for milliseconds.
            fastest_us, tries = math.inf, 0
            while tries < 2 or (tries < _TRIES and _AHEAD * fastest_us > time_us + around_us):
                time_us = statistics.median(self.block(call, ESTIMATE_CALLS).times_us)
                fastest_us, tries = min(fastest_us, self._enqueue_us), tries + 1
            # Else the queue is never empty, since the next block is enqueued while one runs.
            self.blocked = _AHEAD * fastest_us > time_us + around_us
        return Cost(time_us, around_us)

    def enqueue(self, call: Call, calls: int) -> tuple[Any, Callable[[], Block]]:
        """Enqueue a block; return what the last call returned, and what waits for the block.

        One that needs a blocker is waited for at once, to see whether it was held.
        """
        if self.blocked:
            block = self.block(call, calls)
            last, block.last = block.last, None
            return last, lambda: block
        if self._newest is None or self.gpu.passed(self._newest):
            # The queue is empty: the first call would wait for the host behind its own event.
            self._hold(self._hold_us(1))
        last, pairs = self._enqueued(call, calls)
        if self._fell_behind(pairs):
            return self.enqueue(call, calls)
        self._newest = pairs[-1][1]
        return last, lambda: Block(times_us(self.gpu, pairs))

    def block(self, call: Call, calls: int) -> Block:
        """Time a block; if the blocker ended before the block was enqueued, repeat it with twice the length."""
        if not self.blocked:
            self._hold(self._hold_us(1))
            last, pairs = self._enqueued(call, calls)
            if not self._fell_behind(pairs):
                return Block(times_us(self.gpu, pairs), last=last)
        estimate_us, length_us = self._estimate_us, self._hold_us(calls)
        for _ in range(DOUBLINGS + 1):
            guard = self._hold(length_us)
            last, pairs = self._enqueued(call, calls)
            held = not self.gpu.passed(guard)
            block = Block(times_us(self.gpu, pairs), last=last)
            if held:
                return block
            length_us *= 2
        # A call that synchronises with the GPU cannot be blocked; its wait must not count as enqueue time.
        self._estimate_us = estimate_us
        return Block(block.times_us, ("unblocked",), last=block.last)

    def _enqueued(self, call: Call, calls: int) -> tuple[Any, Pairs]:
        began = self.gpu.now_us()
        enqueued = enqueue(self.gpu, self.l2, call, calls)
        self._enqueue_us = (self.gpu.now_us() - began) / calls
        # The host issues the first calls more slowly than later ones.
        self._estimate_us = 0.5 * (self._estimate_us + self._enqueue_us)
        return enqueued

    def _fell_behind(self, pairs: Pairs) -> bool:
        """Return whether the stream was as far as the host: gaps may be inside the times. Then blocks are held."""
        self.blocked = self._close and len(pairs) > 1 and self.gpu.passed(pairs[-2][1])
        return self.blocked

    def _hold_us(self, calls: int) -> float:
        """Return for how long to block the stream before a block of calls: longer than it takes to be enqueued."""
        return MARGIN * self._estimate_us * calls

    def _hold(self, length_us: float) -> Any:
        """Block the stream by a sleep, which unlike an event that waits for the host cannot deadlock.

        Return an event that the stream has not passed as long as it is blocked.
        """
        self.gpu.sleep_us(length_us)
        return self.gpu.event()
