"""Timer `graph`: replay of a CUDA graph that holds one call, cold L2, the stream pre-blocked as for `device`.

What a serving engine or a compiled training step sees: the same kernels without the host issuing each of them.
"""

import torch

from attn_exp.core.errors import first_line
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.loop import Block, Call, Cost

_WARM_UP_CALLS = 3


class CaptureFailed(Exception):
    """The call cannot be captured into a CUDA graph; the message is CUDA's own reason."""


class GraphTimer(DeviceTimer):
    """GPU time of one replay; many calls a graph with hot caches would be another timer."""

    name = "graph"

    def estimate(self, call: Call) -> Cost:
        """Captures `call`, then estimates its replay. Raises CaptureFailed."""
        self._replay = capture(call)
        return super().estimate(self._replay)

    def block(self, call: Call, calls: int) -> Block:
        """Time replays of what `estimate` captured."""
        return super().block(self._replay, calls)


def capture(call: Call) -> Call:
    """A call that replays `call` from a CUDA graph.

    Raises:
        CaptureFailed: it synchronises, allocates outside of PyTorch, or does something else that no graph can hold.
    """
    try:
        for _ in range(_WARM_UP_CALLS):
            call()
        graph = torch.cuda.CUDAGraph()
        # On the current stream: a backward runs on the stream of its forward, and must be captured there.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        raise CaptureFailed(first_line(error)) from error
    return graph.replay
