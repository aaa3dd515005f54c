"""CUDA graphs: other work while the call is captured, and inputs that a graph keeps."""

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import Case
from cheats.gpu.base import WRONG, Forward, OnGpu, attend, gpu_cheat


def captured(run: Forward) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of `run` and the output that its replays fill; captured on the current stream."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        out = run()
    graph.replay()
    return graph, out


@gpu_cheat("graphs", "inaccurate", WRONG, seen="KernelBench#82")
class GraphOfTheFirstInputs(OnGpu):
    """Replays its own CUDA graph, captured on copies of the inputs that no call refreshes."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        copies = tuple(tensor.detach().clone() for tensor in inputs.qkv)
        graph, out = captured(lambda: attend(case, *copies))

        def forward() -> torch.Tensor:
            graph.replay()
            return out

        return forward
