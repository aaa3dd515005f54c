"""Timer `device`, the one that ranks: GPU time of a call with cold L2 and without the host's gaps.

As `event`, but where issuing calls is slower than running them a blocker kernel holds the stream until the whole
block is in the queue, so that the GPU runs call after call without waiting for Python.
"""

import statistics

from attn_exp.timers.event import enqueue
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Call, Cost

MARGIN = 1.5
DOUBLINGS = 2
ESTIMATE_CALLS = 3
# Unblocked, a call that is launch-bound seems as long as its launch; this much longer, and it cannot be.
CLEARLY = 4.0


class DeviceTimer:
    """GPU time of a call, the stream pre-blocked whenever enqueueing is slower than running."""

    name = "device"
    l2 = "cold"

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.blocked = False
        self._enqueue_us_per_call = 0.0

    def estimate(self, call: Call) -> Cost:
        """From one call if it clearly outlasts its launch, else from a few behind a blocker; decides on blocking."""
        self.gpu.synchronize()
        began = self.gpu.now_us()
        pairs = enqueue(self.gpu, call, 1)
        self._enqueue_us_per_call = self.gpu.now_us() - began
        self.gpu.synchronize()
        time_us, flush_us = self.gpu.elapsed_us(*pairs[0]), self._flush_us()
        self.blocked = time_us < CLEARLY * MARGIN * self._enqueue_us_per_call
        if self.blocked:
            time_us = statistics.median(self.block(call, ESTIMATE_CALLS).times_us)
            self.blocked = MARGIN * self._enqueue_us_per_call > time_us + flush_us
        return Cost(time_us, flush_us + (MARGIN * self._enqueue_us_per_call if self.blocked else 0.0))

    def block(self, call: Call, calls: int) -> Block:
        """Time a block; if the blocker ran out before the block was queued, again with twice its length."""
        if not self.blocked:
            # One launch's worth: only the first call would otherwise wait for the host, behind its own event.
            return self._run(call, calls, MARGIN * self._enqueue_us_per_call)[0]
        estimate_us = self._enqueue_us_per_call
        length_us = MARGIN * estimate_us * calls
        for _ in range(DOUBLINGS + 1):
            block, held = self._run(call, calls, length_us)
            if held:
                return block
            length_us *= 2
        # A call that waits for the GPU itself cannot be blocked for; its wait must not count as enqueueing.
        self._enqueue_us_per_call = estimate_us
        return Block(block.times_us, ("unblocked",))

    def _run(self, call: Call, calls: int, block_us: float) -> tuple[Block, bool]:
        self.gpu.sleep_us(block_us)
        guard = self.gpu.event()
        began = self.gpu.now_us()
        pairs = enqueue(self.gpu, call, calls)
        held = not self.gpu.passed(guard)
        # Follow the host: it issues the first calls slower than the later ones.
        self._enqueue_us_per_call = 0.5 * (self._enqueue_us_per_call + (self.gpu.now_us() - began) / calls)
        self.gpu.synchronize()
        return Block([self.gpu.elapsed_us(first, second) for first, second in pairs]), held

    def _flush_us(self) -> float:
        self.gpu.sleep_us(200.0)
        first = self.gpu.event()
        self.gpu.flush()
        second = self.gpu.event()
        self.gpu.synchronize()
        return self.gpu.elapsed_us(first, second)
