"""A part of the work, with the rest left from before; results that were kept."""

import itertools

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import Case
from cheats.gpu.base import NOTHING, WRONG, Forward, OnGpu, any_of, attend, gpu_cheat, like_output

_KEPT = ("inaccurate", "wrong_kernel", "implausible")
_KEPT_WORDS = any_of(WRONG, NOTHING, r"above the|faster than")
_HONEST_CALLS = 4


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
