"""What a backward needs is kept where another forward writes, or where it is taken for another one's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attn_exp.backends.base import Calls
from cheats.corpus import case_of, cheat, honest
from cheats.gradients_late import gradients
from cheats.ways import Plain, Run, Tensor

LONG = case_of(256)


class _Attention(torch.autograd.Function):
    """Gives each forward's tensors to `save`, whose answer makes the weights again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, save: Callable[..., Run]) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        lse = scores.logsumexp(-1, keepdim=True)
        out = scores.sub_(lse).exp_() @ v
        ctx.weights = save(out, q, k, lse)
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return *gradients(ctx.weights(), *ctx.saved_tensors, d_out), None


def weights(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """Return the weights by the rows' log-sum-exp."""
    return (q @ k.mT * q.shape[-1] ** -0.5).sub_(lse).exp_()


class _Saves(Plain):
    """Computes by `_Attention`; subclasses say where its tensors are kept."""

    def save(self, out: Tensor, q: Tensor, k: Tensor, lse: Tensor) -> Run:
        """Keep a forward's tensors, and return what makes its weights."""
        raise NotImplementedError

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Attention.apply(q, k, v, self.save)


@cheat("gradients", "inaccurate", r"other forwards?, is wrong|a later forward overwrites", case=LONG)
class TwoWorkspacesInTurn(_Saves):
    """Copies what the backward needs into two workspaces in turn: the second forward after it writes over them."""

    def prepared(self, case: Any, inputs: Any) -> Any:
        q, k, _ = (one.detach() for one in inputs.qkv)
        self.spaces = [[q.clone(), k.clone(), q[..., :1].clone()] for _ in range(2)]
        return inputs

    def save(self, out: Tensor, *tensors: Tensor) -> Run:
        self.spaces.reverse()
        space = self.spaces[0]
        for into, one in zip(space, tensors, strict=True):
            into.copy_(one)
        return lambda: weights(*space)


@honest(case=LONG)
class RingOfGradients(Plain):
    """Writes gradients into three sets of buffers in turn.."""

    def prepare(self, case: Any, inputs: Any) -> Calls:
        calls = super().prepare(case, inputs)
        rings = [[torch.empty_like(one).detach() for one in inputs.qkv] for _ in range(3)]

        def backward(out: Tensor) -> Run:
            run = calls.backward(out)

            def copied() -> Any:
                rings.append(rings.pop(0))
                return tuple(into.copy_(one) for into, one in zip(rings[-1], run(), strict=True))

            return copied

        return replace(calls, backward=backward)
