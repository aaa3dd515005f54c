"""The wrong formula, the wrong mask, and fewer bits than the case's dtype has."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
from cheats.corpus import BOTH
from cheats.gpu.base import CAPPED, CAUSAL, DENSE, WRONG, Formula, Forward, OnGpu, attend, gpu_cheat

PADDED = replace(DENSE, q_len=1016, kv_len=1016)
GROUPED = replace(DENSE, kv_heads=2)
SINGLE = replace(DENSE, dtype="float32", batch=2, q_heads=4, kv_heads=4)
Tensor = torch.Tensor


@gpu_cheat("formula", "inaccurate", WRONG, case=CAPPED, passes=BOTH)
class SoftcapLeftOutOnGpu(OnGpu):
    """The softcap of 50 is left out, which scores of standard deviation 1 do not show."""


@gpu_cheat("formula", "inaccurate", WRONG, passes=BOTH)
class ScaleOffByOneInAThousand(OnGpu):
    """Scores are too large by 0.1 %."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, scale=1.001 * case.head_dim**-0.5)


@gpu_cheat("formula", "inaccurate", WRONG, passes=BOTH)
class ScaleOffByFourInAThousand(OnGpu):
    """Scores are too small by 0.4 %."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v, scale=0.996 * case.head_dim**-0.5)


@gpu_cheat("formula", "inaccurate", WRONG, case=CAUSAL, passes=BOTH)
class CausalIgnoredInTheLastTile(OnGpu):
    """The last 32 queries also see the keys after their own."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = case.q_len - 32
        most = F.scaled_dot_product_attention(q[:, :, :rows], k[:, :, :rows], v[:, :, :rows], is_causal=True)
        return torch.cat([most, F.scaled_dot_product_attention(q[:, :, rows:], k, v)], 2)


@gpu_cheat("formula", "inaccurate", WRONG, case=PADDED)
class PaddingUnmasked(OnGpu):
    """Keys are padded with zeros to 1,024, and the eight of the padding are seen."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        padding = (0, 0, 0, -case.kv_len % 64)
        return attend(case, q, F.pad(k, padding), F.pad(v, padding))


@gpu_cheat("formula", "inaccurate", WRONG)
class LastKeyUnseen(OnGpu):
    """The last key is left out."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k[:, :, :-1], v[:, :, :-1])


@gpu_cheat("formula", "inaccurate", WRONG, case=GROUPED)
class HeadsOfAnotherGroup(OnGpu):
    """Query head h reads key-value head h modulo their number, instead of h divided by the group."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = case.q_heads // case.kv_heads
        return attend(case, q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1))


@gpu_cheat("formula", "inaccurate", WRONG)
class NoMaximum(Formula):
    """The softmax does not subtract the row's maximum."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.exp((q @ k.mT).float() * case.head_dim**-0.5)
        return ((weights / weights.sum(-1, keepdim=True)) @ v.float()).to(q.dtype)


@gpu_cheat("formula", "inaccurate", WRONG)
class ScoresClamped(Formula):
    """Scores are clamped to at most 12 in magnitude."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q.float() @ k.float().mT * case.head_dim**-0.5).clamp(-12, 12)
        return (torch.softmax(scores, -1) @ v.float()).to(q.dtype)


@gpu_cheat("formula", "inaccurate", WRONG)
class SkipsSmallWeights(Formula):
    """Weights below a hundredth of the row's largest are taken for zero, and not counted in the sum."""

    def attention(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().mT * case.head_dim**-0.5
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = torch.where(weights < 1e-2, 0.0, weights)
        return (weights / weights.sum(-1, keepdim=True) @ v.float()).to(q.dtype)


class _Rounded(OnGpu):
    """Rounds q and k, and perhaps v, before FlashAttention."""

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return the tensor with fewer bits, in its own dtype."""
        raise NotImplementedError

    def make(self, case: Case, inputs: Inputs) -> Forward:
        def forward() -> Tensor:
            q, k, v = inputs.qkv
            return attend(case, self.rounded(q), self.rounded(k), v)

        return forward


@gpu_cheat("precision", "inaccurate", WRONG)
class Int8InsideBf16OnGpu(_Rounded):
    """q and k are int8 with a scale for each token, in a bfloat16 case."""

    def rounded(self, tensor: Tensor) -> Tensor:
        scale = tensor.float().abs().amax(-1, keepdim=True).clamp_min(1e-20) / 127
        return (torch.round(tensor.float() / scale) * scale).to(tensor.dtype)


@gpu_cheat("precision", "inaccurate", WRONG)
class Fp8InsideBf16OnGpu(_Rounded):
    """q and k are e4m3 with a scale for each tensor, in a bfloat16 case."""

    def rounded(self, tensor: Tensor) -> Tensor:
        scale = tensor.float().abs().amax().clamp_min(1e-20) / 448
        return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


@gpu_cheat("precision", "inaccurate", WRONG)
class Fp16InsideBf16OnGpu(OnGpu):
    """Computes a bfloat16 case in float16, which ends at 65,504."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        return lambda: attend(case, *(tensor.half() for tensor in inputs.qkv)).to(inputs.v_bhsd.dtype)


@gpu_cheat("precision", "inaccurate", WRONG, case=SINGLE)
class Bf16InsideFp32OnGpu(OnGpu):
    """Computes a float32 case in bfloat16."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        return lambda: attend(case, *(tensor.bfloat16() for tensor in inputs.qkv)).float()
