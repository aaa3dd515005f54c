"""Honest but odd: streams, buffers, layouts and graphs as real libraries use them."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from attn_exp.attention.autograd import Gradients, autograd_backward
from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.case import Case
from cheats.corpus import BOTH
from cheats.gpu.backward import ByHand
from cheats.gpu.base import (
    CAUSAL,
    RAGGED,
    SHORT,
    Formula,
    Forward,
    OnGpu,
    attend,
    batches,
    gpu_honest,
    like_output,
)
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


@gpu_honest(case=CAUSAL)
class SeveralStreamsJoined(OnGpu):
    """Each row of the batch is computed on a stream of its own; the call's stream joins all of them."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, sides = like_output(inputs), [torch.cuda.Stream() for _ in range(case.batch)]

        def forward() -> torch.Tensor:
            stream = torch.cuda.current_stream()
            for row, side in enumerate(sides):
                side.wait_stream(stream)
                with torch.cuda.stream(side):
                    out[row : row + 1] = attend(case, *batches(case, inputs.qkv, row, row + 1))
            for side in sides:
                stream.wait_stream(side)
            return out

        return forward


@gpu_honest()
class AllOnAJoinedStream(OnGpu):
    """All of the work is on another stream, which the call's stream joins."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, side = like_output(inputs), torch.cuda.Stream(priority=-1)

        def forward() -> torch.Tensor:
            stream = torch.cuda.current_stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                out.copy_(attend(case, *inputs.qkv))
            stream.wait_stream(side)
            return out

        return forward


@gpu_honest(passes=BOTH)
class StridedOutputOnGpu(OnGpu):
    """The output is a view of a wider tensor with the heads of a token adjacent."""

    def attention(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.pad(attend(case, q, k, v).transpose(1, 2), (0, 8))
        return out[..., : case.value_dim].transpose(1, 2)


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
class GraphOfTheSecondCall(OnGpu):
    """The first call runs eagerly, the second captures, later ones replay."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        kept: list[Any] = []
        calls = itertools.count()

        def forward() -> torch.Tensor:
            if next(calls) == 0:
                return attend(case, *inputs.qkv)
            if not kept:
                kept.extend(captured(lambda: attend(case, *inputs.qkv)))
            kept[0].replay()
            out: torch.Tensor = kept[1]
            return out

        return forward


@gpu_honest(case=SHORT)
class WorkspaceInPlace(Formula):
    """The formula into workspaces that are allocated once: float32 scores, softmax in place."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        shape = (case.batch * case.q_heads, case.q_len, case.kv_len)
        scores = torch.empty(shape, dtype=torch.float32, device=inputs.d_out.device)
        sums = torch.empty(shape[0], case.q_len, case.value_dim, dtype=torch.float32, device=inputs.d_out.device)
        out = like_output(inputs)

        def forward() -> torch.Tensor:
            q, k, v = (tensor.detach().float().flatten(0, 1) for tensor in inputs.qkv)
            torch.bmm(q, k.mT, out=scores)
            scores.mul_(case.head_dim**-0.5)
            scores.sub_(scores.amax(-1, keepdim=True)).exp_()
            scores.div_(scores.sum(-1, keepdim=True))
            torch.bmm(scores, v, out=sums)
            out.copy_(sums.view(out.shape))
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


@gpu_honest(passes=BOTH)
class ConvertsInThePreparation(OnGpu):
    """Reads copies in another layout, which it names as its inputs."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        return calls_of(partial(attend, case), inputs.laid_out("bshd"), self.scope)


@gpu_honest()
class ConvertsInEachCallOnGpu(OnGpu):
    """Copies q, k and v into another layout in each call."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        def forward() -> torch.Tensor:
            return attend(case, *(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs.qkv))

        return forward


@gpu_honest(case=replace(RAGGED, q_len=1016, kv_len=1016))
class PadsAndMasksOnGpu(OnGpu):
    """Pads keys to a multiple of 64 in each call, and hides the padding."""

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def make(self, case: Case, inputs: Inputs) -> Forward:
        more = -case.kv_len % 64
        seen = torch.ones(case.q_len, case.kv_len + more, dtype=torch.bool, device=inputs.d_out.device)
        seen[:, case.kv_len :] = False

        def forward() -> torch.Tensor:
            q, k, v = inputs.qkv
            padding = (0, 0, 0, more)
            return F.scaled_dot_product_attention(q, F.pad(k, padding), F.pad(v, padding), attn_mask=seen)

        return forward


@gpu_honest(passes=BOTH)
class ManySmallKernels(OnGpu):
    """One call of SDPA for each head, and one copy of each result."""

    def attention(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [attend(case, q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1]) for h in range(case.q_heads)]
        return torch.cat(heads, 1)


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


@gpu_honest(case=SHORT)
class SumsOfChunksInFloat32(Formula):
    """Keys in chunks with an online softmax, whose sums are float32 buffers that each call clears."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        total = torch.empty(inputs.d_out.shape, dtype=torch.float32, device=inputs.d_out.device)
        row_sum = torch.empty(*inputs.d_out.shape[:3], 1, dtype=torch.float32, device=inputs.d_out.device)

        def forward() -> torch.Tensor:
            q = inputs.q_bhsd.detach().float() * case.head_dim**-0.5
            total.zero_()
            row_sum.zero_()
            row_max = torch.full_like(row_sum, -torch.inf)
            for k, v in zip(inputs.k_bhsd.chunk(4, 2), inputs.v_bhsd.chunk(4, 2), strict=True):
                scores = q @ k.float().mT
                higher = torch.maximum(row_max, scores.amax(-1, keepdim=True))
                weights, rescale = torch.exp(scores - higher), torch.exp(row_max - higher)
                total.mul_(rescale).add_(weights @ v.float())
                row_sum.mul_(rescale).add_(weights.sum(-1, keepdim=True))
                row_max = higher
            return (total / row_sum).to(inputs.v_bhsd.dtype)

        return forward


@gpu_honest(passes=BOTH)
class BackwardOnAJoinedStream(OnGpu):
    """The backward copies its gradients on a side stream, which the call's stream joins."""

    def gradients(self, case: Case, inputs: Inputs, right: Callable[[], Gradients]) -> Callable[[], Gradients]:
        side, kept = torch.cuda.Stream(), [torch.empty_like(tensor.detach()) for tensor in inputs.qkv]

        def backward() -> Gradients:
            found, stream = right(), torch.cuda.current_stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                for to, gradient in zip(kept, found, strict=True):
                    to.copy_(gradient)
            stream.wait_stream(side)
            return tuple(kept)

        return backward


@gpu_honest(passes=BOTH)
class CompiledByItself(OnGpu):
    """Calls torch.compile itself; the first calls compile."""

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v)

        made = torch.compile(attention, dynamic=False)
        return Calls(lambda: made(*inputs.qkv), lambda out: autograd_backward(inputs, out), inputs=inputs)


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
