"""CUDA graphs: other work while the call is captured, and inputs that a graph keeps."""

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from cheats.gpu.base import NOTHING, WRONG, Forward, OnGpu, any_of, attend, batches, gpu_cheat


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


@gpu_cheat("graphs", "inaccurate", WRONG, timer="graph")
class HalfWhileCaptured(OnGpu):
    """Computes half of the batch while it is captured into a CUDA graph, and all of it otherwise."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out = attend(case, *inputs.qkv)

        def forward() -> torch.Tensor:
            rows = case.batch // 2 if torch.cuda.is_current_stream_capturing() else case.batch
            out[:rows] = attend(case, *batches(case, inputs.qkv, 0, rows))
            return out

        return forward


@gpu_cheat("graphs", ("inaccurate", "implausible", "wrong_kernel"), any_of(WRONG, "above the", NOTHING), timer="graph")
class OneQueryWhileCaptured(OnGpu):
    """Computes one query while it is captured into a CUDA graph, and all of them otherwise."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out = attend(case, *inputs.qkv)

        def forward() -> torch.Tensor:
            rows = 1 if torch.cuda.is_current_stream_capturing() else case.q_len
            q, k, v = inputs.qkv
            out[:, :, :rows] = attend(case, q[:, :, :rows], k, v)
            return out

        return forward


@gpu_cheat("graphs", "inaccurate", WRONG, timer="graph")
class OldInputsWhileCaptured(OnGpu):
    """Captures the same kernels on copies of the inputs that were made in the preparation."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        copies = tuple(tensor.detach().clone() for tensor in inputs.qkv)

        def forward() -> torch.Tensor:
            return attend(case, *(copies if torch.cuda.is_current_stream_capturing() else inputs.qkv))

        return forward


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


@gpu_cheat("graphs", "inaccurate", WRONG)
class GraphThatRefreshesOnlyQ(OnGpu):
    """Copies q into its own CUDA graph's inputs in each call, but takes k and v for weights that never change."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        q, k, v = (tensor.detach().clone() for tensor in inputs.qkv)
        graph, out = captured(lambda: attend(case, q, k, v))

        def forward() -> torch.Tensor:
            q.copy_(inputs.q_bhsd)
            graph.replay()
            return out

        return forward
