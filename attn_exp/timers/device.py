"""Timer `device`, the one that ranks: GPU time of a call with cold L2 and without the host's gaps.

As `event`, but where issuing calls is slower than running them a blocker holds the stream until the whole block is in
the queue, so that the GPU runs call after call without waiting for Python.
"""

import statistics

from attn_exp.timers.blocker import DOUBLINGS, Blocker
from attn_exp.timers.event import enqueue
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Call, Cost

ESTIMATE_CALLS = 3
# Unblocked, a call that is launch-bound seems as long as its launch; this much longer, and it cannot be.
CLEARLY = 4.0


class DeviceTimer:
    """GPU time of a call, the stream pre-blocked whenever enqueueing is slower than running."""

    name = "device"
    estimates = True

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2
        self.blocked = False
        self._blocker = Blocker(gpu, 0.0)

    def estimate(self, call: Call) -> Cost:
        """From one call if it clearly outlasts its launch, else from a few behind a blocker; decides on blocking."""
        self.gpu.synchronize()
        began = self.gpu.now_us()
        pairs = enqueue(self.gpu, self.l2, call, 1)
        self._blocker = Blocker(self.gpu, self.gpu.now_us() - began)
        self.gpu.synchronize()
        time_us, flush_us = self.gpu.elapsed_us(*pairs[0]), self._flush_us()
        self.blocked = time_us < CLEARLY * self._blocker.length_us(1)
        if self.blocked:
            time_us = statistics.median(self.block(call, ESTIMATE_CALLS).times_us)
            self.blocked = self._blocker.length_us(1) > time_us + flush_us
        return Cost(time_us, flush_us + (self._blocker.length_us(1) if self.blocked else 0.0))

    def block(self, call: Call, calls: int) -> Block:
        """Time a block; if the blocker ran out before the block was queued, again with twice its length."""
        if not self.blocked:
            # One launch's worth: only the first call would otherwise wait for the host, behind its own event.
            return self._run(call, calls, self._blocker.length_us(1))[0]
        enqueue_us, length_us = self._blocker.enqueue_us, self._blocker.length_us(calls)
        for _ in range(DOUBLINGS + 1):
            block, held = self._run(call, calls, length_us)
            if held:
                return block
            length_us *= 2
        # A call that waits for the GPU itself cannot be blocked for; its wait must not count as enqueueing.
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

    def _flush_us(self) -> float:
        self.gpu.sleep_us(200.0)
        first = self.gpu.event()
        self.gpu.flush(self.l2)
        second = self.gpu.event()
        self.gpu.synchronize()
        return self.gpu.elapsed_us(first, second)
