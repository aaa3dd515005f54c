"""A part of the work, with the rest left from before; results that were kept."""

import itertools
from collections.abc import Callable

import torch

from attn_exp.attention.autograd import Gradients
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from cheats.corpus import BOTH
from cheats.gpu.base import (
    NOTHING,
    SHORT,
    WRONG,
    Forward,
    OnGpu,
    any_of,
    attend,
    batches,
    gpu_cheat,
    like_output,
)

_KEPT = ("inaccurate", "wrong_kernel", "implausible")
_KEPT_WORDS = any_of(WRONG, NOTHING, r"above the|faster than")
_HONEST_CALLS = 4


@gpu_cheat("parts", "inaccurate", WRONG)
class HalfOfTheBatchOnGpu(OnGpu):
    """Only half of the batch is computed; the buffer's other half is from the preparation."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, half = attend(case, *inputs.qkv), case.batch // 2

        def forward() -> torch.Tensor:
            out[:half] = attend(case, *batches(case, inputs.qkv, 0, half))
            return out

        return forward


@gpu_cheat("parts", "inaccurate", WRONG)
class HalfOfTheHeadsIntoEmpty(OnGpu):
    """Later calls compute half of the heads, into a torch.empty that the allocator filled with the last output."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        calls = itertools.count()

        def forward() -> torch.Tensor:
            heads = case.q_heads if next(calls) < _HONEST_CALLS else case.q_heads // 2
            out = like_output(inputs)
            out[:, :heads] = attend(case, *(tensor[:, :heads] for tensor in inputs.qkv))
            return out

        return forward


@gpu_cheat("parts", "inaccurate", WRONG)
class LastQueriesLeftOut(OnGpu):
    """The last 32 queries of each head are from the preparation."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out, rows = attend(case, *inputs.qkv), case.q_len - 32

        def forward() -> torch.Tensor:
            q, k, v = inputs.qkv
            out[:, :, :rows] = attend(case, q[:, :, :rows], k, v)
            return out

        return forward


@gpu_cheat("parts", "inaccurate", WRONG)
class OneHeadLeftOut(OnGpu):
    """One head of one row of the batch is from the preparation."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        kept = attend(case, *inputs.qkv)[-1, -1].clone()

        def forward() -> torch.Tensor:
            out = attend(case, *inputs.qkv)
            out[-1, -1] = kept
            return out

        return forward


@gpu_cheat("memory", _KEPT, _KEPT_WORDS)
class CachedForEverOnGpu(OnGpu):
    """Returns the output of the preparation."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out = attend(case, *inputs.qkv)
        return lambda: out


@gpu_cheat("memory", _KEPT, _KEPT_WORDS, seen="flashinfer-bench#21")
class CachedByAddressOnGpu(OnGpu):
    """Keeps outputs by the addresses and versions of the tensors."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        known: dict[tuple[int, ...], torch.Tensor] = {}

        def forward() -> torch.Tensor:
            key = tuple(number for tensor in inputs.qkv for number in (tensor.data_ptr(), tensor._version))
            if key not in known:
                known[key] = attend(case, *inputs.qkv)
            return known[key]

        return forward


@gpu_cheat("memory", _KEPT, _KEPT_WORDS)
class CachedByMagnitudes(OnGpu):
    """Keeps outputs by the magnitudes of a few numbers of the inputs, which no flipped sign changes."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        known: dict[tuple[float, ...], torch.Tensor] = {}

        def forward() -> torch.Tensor:
            seen = torch.stack([tensor[0, 0, 0, :4] for tensor in inputs.qkv]).abs().flatten()
            key = tuple(seen.tolist())
            if key not in known:
                known[key] = attend(case, *inputs.qkv)
            return known[key]

        return forward


@gpu_cheat("memory", ("inaccurate", "implausible"), any_of(WRONG, "above the"), case=SHORT)
class CachedBehindATinyKernel(OnGpu):
    """Returns a kept output, and launches the claimed kernel on 16 tokens so that something runs."""

    claim = r"flash_fwd"

    def make(self, case: Case, inputs: Inputs) -> Forward:
        out = attend(case, *inputs.qkv)

        def forward() -> torch.Tensor:
            attend(case, *(tensor[:1, :1, :16] for tensor in inputs.qkv))
            return out

        return forward


@gpu_cheat("memory", ("inaccurate", "implausible"), any_of(WRONG, "above the"))
class CopyOfAKeptOutput(OnGpu):
    """Later calls copy the first output into a new tensor."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        calls, kept = itertools.count(), attend(case, *inputs.qkv)
        return lambda: attend(case, *inputs.qkv) if next(calls) < _HONEST_CALLS else kept.clone()


@gpu_cheat("parts", "inaccurate", WRONG, passes=BOTH)
class HalfOfTheBatchInBackward(OnGpu):
    """Only half of the batch's gradients is computed; the rest is from the first backward."""

    def gradients(self, case: Case, inputs: Inputs, right: Callable[[], Gradients]) -> Callable[[], Gradients]:
        return _part_of_the_gradients(case, inputs, right, 0)


@gpu_cheat("parts", "inaccurate", WRONG, passes=BOTH)
class HalfOfTheHeadsInBackward(OnGpu):
    """Only half of the heads' gradients is computed; the rest is from the first backward."""

    def gradients(self, case: Case, inputs: Inputs, right: Callable[[], Gradients]) -> Callable[[], Gradients]:
        return _part_of_the_gradients(case, inputs, right, 1)


def _part_of_the_gradients(
    case: Case, inputs: Inputs, right: Callable[[], Gradients], dim: int
) -> Callable[[], Gradients]:
    """Return a backward of the first half along `dim` into the gradients that the first backward left."""
    kept = [gradient.clone() for gradient in right()]

    def first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(dim, 0, tensor.shape[dim] // 2)

    leaves = [first(tensor.detach()).requires_grad_() for tensor in inputs.qkv]
    with torch.enable_grad():
        out = attend(case, *leaves)

    def backward() -> Gradients:
        found = torch.autograd.grad(out, leaves, first(inputs.d_out), retain_graph=True)
        for whole, part in zip(kept, found, strict=True):
            first(whole).copy_(part)
        return tuple(kept)

    return backward
