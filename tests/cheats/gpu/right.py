"""Honest but odd: streams, buffers, layouts and graphs as real libraries use them."""

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import Case
from cheats.corpus import BOTH
from cheats.gpu.backward import ByHand
from cheats.gpu.base import CAUSAL, SHORT, Forward, OnGpu, attend, batches, gpu_honest, like_output
from cheats.gpu.graphs import captured


@gpu_honest(passes=BOTH)
class SideStreamJoined(OnGpu):
    """Half of the batch is computed on a side stream, which the call's stream joins by an event."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        side, half = torch.cuda.Stream(), case.batch // 2

        def forward() -> torch.Tensor:
            stream = torch.cuda.current_stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                second = attend(case, *batches(case, inputs.qkv, half, case.batch))
            first = attend(case, *batches(case, inputs.qkv, 0, half))
            done = torch.cuda.Event()
            done.record(side)
            stream.wait_event(done)
            second.record_stream(stream)
            return torch.cat([first, second])

        return forward


@gpu_honest()
class GraphWithCopiedInputs(OnGpu):
    """Replays its own CUDA graph, into whose inputs each call copies q, k and v."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        static = tuple(tensor.detach().clone() for tensor in inputs.qkv)
        graph, out = captured(lambda: attend(case, *static))

        def forward() -> torch.Tensor:
            for tensor, given in zip(static, inputs.qkv, strict=True):
                tensor.copy_(given)
            graph.replay()
            return out

        return forward


@gpu_honest(case=CAUSAL)
class GraphThatReadsInPlace(OnGpu):
    """Replays its own CUDA graph, which reads the inputs where they are."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        graph, out = captured(lambda: attend(case, *(tensor.detach() for tensor in inputs.qkv)))

        def forward() -> torch.Tensor:
            graph.replay()
            return out

        return forward


@gpu_honest()
class RingOfBuffersOnGpu(OnGpu):
    """Three output buffers take turns."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        ring = itertools.cycle([like_output(inputs) for _ in range(3)])

        def forward() -> torch.Tensor:
            out = next(ring)
            out.copy_(attend(case, *inputs.qkv))
            return out

        return forward


@gpu_honest()
class WaitsForTheDevice(OnGpu):
    """Synchronises with the device inside of the call, and reads a number of the output on the host."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        def forward() -> torch.Tensor:
            out = attend(case, *inputs.qkv)
            torch.cuda.synchronize()
            assert out[0, 0, 0, 0].item() < float("inf")
            return out

        return forward


@gpu_honest(passes=BOTH, case=SHORT)
class AtomicsInDq(ByHand):
    """dq is summed by atomic additions in float32, in an order that differs from call to call."""

    def dq_of(self, ds: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rows, parts = ds.shape[0] * ds.shape[1], 4
        split = zip(ds.chunk(parts, -1), k.chunk(parts, 2), strict=True)
        found = torch.cat([(one @ keys).flatten(0, 1).flatten(1) for one, keys in split])
        index = torch.arange(rows, device=k.device).repeat(parts)
        total = torch.zeros(rows, found.shape[1], device=k.device)
        return total.index_add_(0, index, found).view(k.shape[0], k.shape[1], ds.shape[2], k.shape[3])


@gpu_honest()
class CudagraphTrees(OnGpu):
    """torch.compile in mode reduce-overhead, whose outputs live in a CUDA graph's memory."""

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def make(self, case: Case, inputs: Inputs) -> Forward:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v)

        made = torch.compile(attention, dynamic=False, mode="reduce-overhead")

        def forward() -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            out: torch.Tensor = made(*inputs.qkv)
            return out

        return forward
