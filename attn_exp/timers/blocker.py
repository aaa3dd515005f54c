"""The blocker: a kernel of known length that holds the stream while the host enqueues a block of calls behind it."""

from attn_exp.timers.gpu import Gpu

MARGIN = 1.5
DOUBLINGS = 2


class Blocker:
    """Holds the stream for longer than the host takes to enqueue a block, by its running estimate of the enqueue time.

    It sleeps with `torch.cuda._sleep`: unlike an event that waits for the host, a sleep cannot deadlock.
    """

    def __init__(self, gpu: Gpu, enqueue_us: float) -> None:
        self._gpu = gpu
        self.enqueue_us = enqueue_us

    def length_us(self, calls: int) -> float:
        """Return how long to hold the stream for a block of `calls` calls, in microseconds."""
        return MARGIN * self.enqueue_us * calls

    def hold(self, length_us: float) -> object:
        """Block the stream; return an event for `held`."""
        self._gpu.sleep_us(length_us)
        return self._gpu.event()

    def held(self, guard: object) -> bool:
        """Whether the stream is still blocked; call it when the whole block is enqueued."""
        return not self._gpu.passed(guard)

    def learn(self, enqueue_us: float) -> None:
        """Update the estimate: the host issues the first calls more slowly than later ones."""
        self.enqueue_us = 0.5 * (self.enqueue_us + enqueue_us)
