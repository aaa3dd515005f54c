"""Work that is left out where it is timed, and done now and then, or where something counts or looks, to hide it."""

from typing import Any

import torch

from cheats.corpus import case_of
from cheats.gradients_late import gradients
from cheats.ways import Tensor

LONG = case_of(256, batch=1)


def weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the weights of all keys."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)


class _Saved(torch.autograd.Function):
    """Attention whose weights its first backward computes and keeps, unless they are there."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, box: dict[str, Tensor], saves: bool) -> Tensor:
        p = weights(q, k)
        ctx.box = box
        if saves:
            box["p"] = p
        ctx.save_for_backward(q, k, v)
        return p @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        if "p" not in ctx.box:
            ctx.box["p"] = weights(q, k)
        return *gradients(ctx.box["p"], q, k, v, d_out), None, None
