"""Fewer bits than the case asks for."""

from dataclasses import replace
from typing import Any

import torch

from attn_exp.backends.base import Calls
from attn_exp.core.case import Case
from cheats.blocks import HALF_LAYER, Codes
from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Run, Tensor, attend, softmax

OUT = r"\bout\b"
HALF = case_of(256, dtype="bfloat16", head_dim=64, value_dim=64)
SEEN = ("wafer",)


def _in(dtype: torch.dtype, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(case, q.to(dtype), k.to(dtype), v.to(dtype)).to(q.dtype)


def int8(x: Tensor, dim: int | None = None) -> Tensor:
    """Round to 255 steps between the largest magnitudes, along a dimension or of the tensor."""
    step = (x.detach().abs().amax() if dim is None else x.detach().abs().amax(dim, keepdim=True)) / 127
    return (x / step).round() * step


def e4m3(x: Tensor) -> Tensor:
    """Round to e4m3 with one scale for the tensor."""
    scale = x.detach().abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def truncated(x: Tensor, bits: int) -> Tensor:
    """Cut float32 off after so many bits of the mantissa."""
    return (x.detach().view(torch.int32) & ~((1 << (23 - bits)) - 1)).view(torch.float32)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=HALF, seen=SEEN)
class Fp16InsideBf16(Plain):
    """Computes bf16 in fp16, more exact until something passes 65,504."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _in(torch.float16, case, q, k, v)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, seen=SEEN)
class Fp16InsideFp32(Plain):
    """Computes fp32 in fp16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _in(torch.float16, case, q, k, v)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, seen=SEEN)
class Bf16InsideFp32(Plain):
    """Computes fp32 in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _in(torch.bfloat16, case, q, k, v)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=case_of(dtype="float16"), seen=SEEN)
class Bf16InsideFp16(Plain):
    """Computes fp16 in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _in(torch.bfloat16, case, q, k, v)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, seen=SEEN)
class Tf32InsideFp32(Plain):
    """Cuts operands of matrix products to TF32's ten bits."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, truncated(q, 10), truncated(k, 10), truncated(v, 10), p=lambda p: truncated(p, 10))


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=HALF, seen=SEEN)
class Int8InsideBf16(Plain):
    """Rounds q and k to int8 before the scores, as SageAttention does, in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(case, int8(q.float()), int8(k.float()), v.float())
        return out.to(q.dtype)


@cheat("precision", "inaccurate", r"out in head .* does not explain", passes=FORWARD, case=HALF, seen=SEEN)
class Int8ByRowInsideBf16(Plain):
    """Rounds q and k to int8 with a scale for each row, unless a sample of rows has an outlier, in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        exact = max(float(one[:, :, ::16].detach().abs().amax()) for one in (q, k)) > 8
        q, k = (one.float() if exact else int8(one.float(), dim=-1) for one in (q, k))
        return attend(case, q, k, v.float()).to(v.dtype)


@cheat("blocks", "inaccurate", r"the attention alone.* does not explain", passes=FORWARD, case=HALF_LAYER)
class Int8InALayer(Plain):
    """Gives a decoder layer a function that rounds q and k to int8, and computes its own forwards exactly."""

    def prepare(self, case: Case, inputs: Any) -> Calls:
        def coded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(case, int8(q.float(), dim=-1), int8(k.float(), dim=-1), v.float()).to(v.dtype)

        return replace(super().prepare(case, inputs), attention=coded)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16", head_dim=64))
class LogSumExpInBf16(Plain):
    """Merges four parts of the keys by log-sum-exps that it holds in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().mT * case.head_dim**-0.5
        sums, parts = [], []
        for s, values in zip(scores.chunk(4, -1), v.float().chunk(4, 2), strict=True):
            sums.append(s.logsumexp(-1, keepdim=True).bfloat16().float())
            parts.append(s.softmax(-1) @ values)
        return (torch.stack(parts) * torch.stack(sums).softmax(0)).sum(0).to(q.dtype)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, seen=SEEN)
class Int8InsideFp32(Plain):
    """Rounds q and k to int8 before the scores, in fp32."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, int8(q), int8(k), v)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=HALF, seen=SEEN)
class Fp8InsideBf16(Plain):
    """Rounds q, k and v to e4m3, in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, *(e4m3(one.float()) for one in (q, k, v))).to(q.dtype)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=HALF)
class WeightsInE4m3(Plain):
    """Rounds the weights to e4m3 before their product with v, in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.float(), k.float(), v.float(), p=e4m3).to(q.dtype)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=HALF)
class ValuesInE5m2(Plain):
    """Rounds v to e5m2, in bf16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q, k, v.to(torch.float8_e5m2).to(v.dtype))


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, dtype="bfloat16"))
class SumsInBf16(Plain):
    """Adds up the products of 512 keys in bf16, one rounding after another."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = softmax(q @ k.mT * case.head_dim**-0.5)
        out = torch.zeros_like(p[..., :1] * v[:, :, :1])
        for begin in range(case.kv_len):
            out += p[..., begin : begin + 1] @ v[:, :, begin : begin + 1]
        return out


@cheat("precision", "inaccurate", r"channel \d+ of out is off", passes=FORWARD)
class ValuesInCodesByToken(Plain):
    """Rounds v to integers of 26 bits with a scale for each token, in fp32."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = v.detach().double().abs().amax(-1, keepdim=True).clamp(min=1e-300) / 2**25
        return attend(case, q, k, ((v / step).round() * step).float())


@cheat("precision", "inaccurate", OUT, passes=FORWARD)
class RoundedTo14Bits(Plain):
    """Returns results with 14 of 24 bits."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return truncated(attend(case, q, k, v), 14)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=HALF)
class RoundedTo5Bits(Plain):
    """Returns bf16 results with 5 of 8 bits."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return truncated(attend(case, q.float(), k.float(), v.float()), 5).to(q.dtype)


@cheat("precision", "inaccurate", OUT, passes=FORWARD, case=case_of(256, dtype="float16"))
class ScoresInBf16(Plain):
    """Holds scores in bf16, in fp16."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, q.float(), k.float(), v.float(), scores=lambda s: s.bfloat16().float()).to(q.dtype)


@cheat("precision", "inaccurate", OUT, passes=FORWARD)
class DenormalsFlushed(Plain):
    """Treats inputs below 0.01 as zero, as a coarse flush of small numbers."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(case, *(one.masked_fill(one.abs() < 0.01, 0.0) for one in (q, k, v)))


@cheat("fp8", "inaccurate", OUT, passes=FORWARD, case=case_of(512, batch=1, head_dim=64, dtype="float8_e4m3fn"))
class WeightsWithoutAScale(Codes):
    """Normalises the weights before it rounds them to e4m3 without a scale, which loses those below 2^-10, in fp8."""

    def forward(self, run: Run) -> Tensor:
        q, k, v = self.numbers(self.case)
        return attend(self.case, q, k, v, p=lambda p: p.to(torch.float8_e4m3fn).float()).bfloat16()
