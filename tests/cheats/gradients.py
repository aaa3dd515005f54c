"""Backwards that do less than a backward, or do it when nobody times it."""

from typing import Any

import torch

from cheats.corpus import cheat
from cheats.ways import Plain, Run, Tensor

ANY = r"\bd[qkv]\b|result of the first call"


@cheat("gradients", "inaccurate", ANY, seen="tensara#238")
class FirstGradientsForEver(Plain):
    """Returns the gradients of the first backward for ever."""

    kept: Any = None

    def backward(self, run: Run) -> Any:
        self.kept = self.kept or run()
        return self.kept


def slow_weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the softmax of the scores, computed several times in float64."""
    for _ in range(3):
        weights = torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1)
    return weights


class _KeepsWeights(torch.autograd.Function):
    """Saves nothing but the inputs; the weights are computed in the first backward of a graph, and stay with it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        ctx.save_for_backward(q, k, v, out)
        ctx.weights = None
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        if ctx.weights is None:
            # Slowly, so that the difference shows on a busy machine, too.
            ctx.weights = slow_weights(q, k).to(q.dtype)
        p = ctx.weights
        ds = ((d_out @ v.mT) - (d_out * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        return ds @ k, ds.mT @ q, p.mT @ d_out
