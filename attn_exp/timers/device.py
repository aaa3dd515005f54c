"""Timer `device`, the default on a GPU: GPU time of a call with cold L2 and without host gaps.

It measures as `event` does. Where issuing calls takes longer than running them, a blocker also holds the stream until
the whole block is enqueued, so that the GPU runs call after call without waiting for Python.
"""

import statistics

from attn_exp.timers.blocker import DOUBLINGS, Blocker
from attn_exp.timers.event import enqueue
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost
from attn_exp.timers.timed_call import Call, as_timed

ESTIMATE_CALLS = 3
# Unblocked, a launch-bound call seems as long as its launch. A call that takes this many times as long is not
# launch-bound.
CLEARLY = 4.0


class DeviceTimer:
    """GPU time of a call, with the stream blocked first if enqueueing is slower than running."""

    name = "device"
    estimates = True

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2
        self.blocked = False
        self._blocker = Blocker(gpu, 0.0)

    def estimate(self, call: Call) -> Cost:
        """Estimate from one call if it clearly outlasts its launch, else from a few behind a blocker.

        Decide whether to block.
        """
        self.gpu.synchronize()
        began = self.gpu.now_us()
        pairs = enqueue(self.gpu, self.l2, call, 1)
        self._blocker = Blocker(self.gpu, self.gpu.now_us() - began)
        self.gpu.synchronize()
        time_us, around_us = self.gpu.elapsed_us(*pairs[0]), self._around_us(call)
        self.blocked = time_us < CLEARLY * self._blocker.length_us(1)
        if self.blocked:
            time_us = statistics.median(self.block(call, ESTIMATE_CALLS).times_us)
            self.blocked = self._blocker.length_us(1) > time_us + around_us
        return Cost(time_us, around_us + (self._blocker.length_us(1) if self.blocked else 0.0))

    def block(self, call: Call, calls: int) -> Block:
        """Time a block; if the blocker ended before the block was enqueued, repeat it with twice the length."""
        if not self.blocked:
            # The length of one launch: otherwise the first call would wait for the host behind its own event.
            return self._run(call, calls, self._blocker.length_us(1))[0]
        enqueue_us, length_us = self._blocker.enqueue_us, self._blocker.length_us(calls)
        for _ in range(DOUBLINGS + 1):
            block, held = self._run(call, calls, length_us)
            if held:
                return block
            length_us *= 2
        # A call that synchronises with the GPU cannot be blocked; its wait must not count as enqueue time.
        self._blocker.enqueue_us = enqueue_us
        return Block(block.times_us, ("unblocked",))

    def _run(self, call: Call, calls: int, length_us: float) -> tuple[Block, bool]:
        guard = self._blocker.hold(length_us)
        began = self.gpu.now_us()
        pairs = enqueue(self.gpu, self.l2, call, calls)
        held = self._blocker.held(guard)
        self._blocker.learn((self.gpu.now_us() - began) / calls)
        self.gpu.synchronize()
        return Block([self.gpu.elapsed_us(first, second) for first, second in pairs]), held

    def _around_us(self, call: Call) -> float:
        """Return the GPU's time to renew the inputs and flush the caches."""
        self.gpu.sleep_us(200.0)
        first = self.gpu.event()
        as_timed(call).before()
        self.gpu.flush(self.l2)
        second = self.gpu.event()
        self.gpu.synchronize()
        return self.gpu.elapsed_us(first, second)
