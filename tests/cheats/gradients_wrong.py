"""Backwards whose gradients are wrong at once."""

from typing import Any

import torch

from attn_exp.attention.formula import formula
from attn_exp.attention.scores import sinks_of
from cheats.corpus import case_of, cheat
from cheats.ways import Plain, Tensor, hidden

ANY = r"\bd[qkv]\b"


class _SharedStatistics(torch.autograd.Function):
    """Keeps the rows' log-sum-exp and the output in one workspace that all calls of a shape share."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, workspace: dict[str, Tensor]) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        workspace["lse"] = scores.logsumexp(-1, keepdim=True)
        workspace["out"] = (scores - workspace["lse"]).exp() @ v
        ctx.save_for_backward(q, k, v)
        ctx.workspace = workspace
        return workspace["out"].clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        p = (q @ k.mT * scale - ctx.workspace["lse"]).exp()
        ds = p * (d_out @ v.mT - (d_out * ctx.workspace["out"]).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ d_out, None


@cheat("gradients", "inaccurate", r"a later forward overwrites what the backward .* needs: d[qkv] ")
class SharedStatistics(Plain):
    """Keeps what the backward needs where the next forward writes: wrong for two layers, or two micro-batches."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        self.workspace: dict[str, Tensor] = {}
        return inputs

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _SharedStatistics.apply(q, k, v, self.workspace)


class _OfTheSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        return torch.ones_like(d_out)


@cheat("gradients", "inaccurate", "gradients are those of a d_out of ones")
class GradientsOfTheSum(Plain):
    """Differentiates the sum of the output, whatever the output's gradient is."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _OfTheSum.apply(super().attention(case, q, k, v))  # type: ignore[no-any-return,no-untyped-call]


@cheat("gradients", "inaccurate", "the backward has no d_sink", case=case_of(sink=True, causal=True))
class SinksWithoutGradient(Plain):
    """Takes the sinks as constants."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return formula(case, hidden(case, q.device), q, k, v, sinks=sinks_of(case, q.device))
