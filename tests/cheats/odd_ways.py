"""Honest backends that compute in an unusual way."""

import time
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attn_exp.core.record.request import Compile
from cheats.corpus import FORWARD, honest
from cheats.ways import Plain, Run, Tensor, attend, softmax


def _ways(case: Any, q: Tensor, k: Tensor, v: Tensor) -> list[Run]:
    """Three ways to compute one thing."""
    return [
        lambda: attend(case, q, k, v),
        lambda: scaled_dot_product_attention(q, k, v),
        lambda: attend(case, q.transpose(-1, -2).contiguous().mT, k, v),
    ]


@honest()
class TunesItself(Plain):
    """Tries three algorithms in its first calls and stays with the fastest."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.times: list[float] = []
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ways = _ways(case, q, k, v)
        if len(self.times) == len(ways):
            return ways[self.times.index(min(self.times))]()
        began = time.perf_counter()
        out = ways[len(self.times)]()
        self.times.append(time.perf_counter() - began)
        return out


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        p = softmax(q @ k.mT * scale)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return p @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, p = ctx.saved_tensors
        dp = d_out @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ d_out, None


@honest()
class OwnFunction(Plain):
    """Has its own torch.autograd.Function."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Own.apply(q, k, v, case.head_dim**-0.5)


@honest()
class Recomputes(Plain):
    """Saves nothing and computes the forward again in the backward."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda *qkv: attend(case, *qkv), q, k, v, use_reentrant=False)


@honest(compile=Compile(mode="default"), passes=FORWARD)
class Compiled(Plain):
    """Is compiled by torch.compile."""
