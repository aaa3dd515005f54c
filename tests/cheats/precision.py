"""Fewer bits than the case asks for."""

from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.ways import Plain, Tensor, attend

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
class Bf16InsideFp32(Plain):
    """Computes fp32 in bf16."""

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
