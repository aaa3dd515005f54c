"""Timer `event`: a pair of CUDA events around each call, with flushed caches and an unblocked stream.

It reports what Triton's `do_bench` reports. For a call that is shorter than its launch it measures the host.
"""

import statistics
from collections.abc import Callable
from typing import Any

from attn_exp.timers.call import Call
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Block, Cost

# Until the queue is as full as in a longer loop.
_WARM_CALLS = 20


Pairs = list[tuple[Any, Any]]


def enqueue(gpu: Gpu, l2: str, call: Call, calls: int) -> tuple[Any, Pairs]:
    """Enqueue flush, event, call, event `calls` times: between two calls there is the flush and nothing else.

    Returns:
        The last call's result, and the events of each call.
    """
    pairs, last = [], None
    for _ in range(calls):
        # Its memory may be reused by the next call, as in a loop that drops results.
        last = None
        gpu.flush(l2)
        first = gpu.event()
        last = call()
        pairs.append((first, gpu.event()))
    return last, pairs


def times_us(gpu: Gpu, pairs: Pairs) -> list[float]:
    """Wait for the last call of a block, and return the time of each in microseconds."""
    gpu.wait(pairs[-1][1])
    return [gpu.elapsed_us(first, second) for first, second in pairs]


class EventTimer:
    """GPU time between two events around each call, host gaps included."""

    name = "event"
    estimates = False

    def __init__(self, gpu: Gpu, l2: str = "cold") -> None:
        self.gpu, self.l2 = gpu, l2

    def estimate(self, call: Call) -> Cost:
        """Estimate the cost from 3 calls, after which the queue is empty."""
        _, pairs = enqueue(self.gpu, self.l2, call, 3)
        return Cost(statistics.median(times_us(self.gpu, pairs)), flush_us(self.gpu, self.l2))

    def enqueue(self, call: Call, calls: int) -> Callable[[], Block]:
        """Enqueue a block behind what is in the queue; return what waits for it."""
        _, pairs = enqueue(self.gpu, self.l2, call, calls)
        return lambda: Block(times_us(self.gpu, pairs))

    def block(self, call: Call, calls: int) -> Block:
        """Make some calls until the queue is as full as in a long loop, then time `calls` calls."""
        last, pairs = enqueue(self.gpu, self.l2, call, _WARM_CALLS + calls)
        return Block(times_us(self.gpu, pairs)[_WARM_CALLS:], last=last)


def flush_us(gpu: Gpu, l2: str) -> float:
    """Return the GPU's time of one flush, measured while the stream is held back."""
    gpu.sleep_us(200.0)
    first = gpu.event()
    gpu.flush(l2)
    second = gpu.event()
    gpu.synchronize()
    return gpu.elapsed_us(first, second)
