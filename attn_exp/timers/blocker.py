"""Blocker: a kernel of a known length that holds the stream while the host enqueues a block of calls behind it."""

from attn_exp.timers.gpu import Gpu

MARGIN = 1.5
DOUBLINGS = 2


class Blocker:
    """Knows how long the host takes to enqueue a call, and sleeps on the GPU for a margin more than that.

    `torch.cuda._sleep` underneath: unlike an event that waits for the host it cannot deadlock.
    """

    def __init__(self, gpu: Gpu, enqueue_us: float) -> None:
        self._gpu = gpu
        self.enqueue_us = enqueue_us

    def length_us(self, calls: int) -> float:
        """How long a block of so many calls is held for."""
        return MARGIN * self.enqueue_us * calls

    def hold(self, length_us: float) -> object:
        """Block the stream; what comes back tells `held` whether it was long enough."""
        self._gpu.sleep_us(length_us)
        return self._gpu.event()

    def held(self, guard: object) -> bool:
        """Whether the stream is still blocked, asked when everything is enqueued."""
        return not self._gpu.passed(guard)

    def learn(self, enqueue_us: float) -> None:
        """Follow the host, which issues the first calls slower than the later ones."""
        self.enqueue_us = 0.5 * (self.enqueue_us + enqueue_us)
