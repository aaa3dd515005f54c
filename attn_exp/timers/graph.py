"""Timer `graph`: replay of a CUDA graph of one call, with cold L2 and the stream blocked as in `device`.

It measures what a serving engine or a compiled training step has: the same kernels without their launches by the host.
"""

from collections.abc import Callable
from typing import Any

import torch

from attn_exp.core.errors import first_line
from attn_exp.timers.call import Call
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.loop import Block, Cost

_WARM_UP_CALLS = 3


class CaptureFailed(Exception):
    """The call cannot be captured into a CUDA graph; the message has CUDA's reason."""


class GraphTimer(DeviceTimer):
    """GPU time of one replay. A graph of many calls would leave the caches hot."""

    name = "graph"

    def estimate(self, call: Call) -> Cost:
        """Capture `call` and estimate its replay.

        Raises:
            CaptureFailed: the call cannot be captured.
        """
        self._replay = capture(call)
        return super().estimate(self._replay)

    def enqueue(self, call: Call, calls: int) -> Callable[[], Block]:
        """Enqueue replays of the call that `estimate` captured."""
        return super().enqueue(self._replay, calls)

    def block(self, call: Call, calls: int) -> Block:
        """Time replays of the call that `estimate` captured."""
        return super().block(self._replay, calls)


def capture(call: Call) -> Call:
    """Return a call that replays `call` from a CUDA graph, whose replays overwrite one result."""
    try:
        for _ in range(_WARM_UP_CALLS):
            call()
        graph = torch.cuda.CUDAGraph()
        # On the current stream: a backward runs on its forward's stream, and must be captured there.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            result = call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        raise CaptureFailed(first_line(error)) from error

    def replay() -> Any:
        graph.replay()
        return result

    return replay
