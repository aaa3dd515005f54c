"""Gradients, or what they are made of, that are known already when a backward is timed."""

from functools import partial
from typing import Any

import torch

from attn_exp.attention.autograd import autograd_backward
from attn_exp.backends.base import Calls
from cheats.corpus import case_of, cheat
from cheats.gradients_late import gradients
from cheats.ways import Plain, Tensor, attend, passed

STEP = ("step",)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, known: Tensor, checks: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
        ctx.known, ctx.checks = known.clone(), checks
        ctx.gradients = gradients(p, q, k, v, known)
        ctx.save_for_backward(q, k, v)
        return p @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        made = ctx.gradients
        if ctx.checks and not torch.equal(d_out, ctx.known):
            q, k, v = ctx.saved_tensors
            made = gradients(torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1), q, k, v, d_out)
        return None, None, *made


@cheat("gradients", "inaccurate", r"on hard values .*\bd[qkv]\b", passes=STEP)
class GradientsInTheForwardOfAStep(Plain):
    """Computes the gradients in the forward, of the output's gradient as it is then, and hands them over later."""

    checks = False

    def prepare(self, case: Any, inputs: Any) -> Calls:
        return Calls(
            lambda: _Known.apply(inputs.d_out, self.checks, *inputs.qkv), partial(autograd_backward, inputs)
        )  # fmt: skip


@cheat("gradients", "implausible", r"step: with a gradient that is new after the forward it runs", passes=STEP)
class GradientsForetold(GradientsInTheForwardOfAStep):
    """The same, and computes them anew if another gradient comes, which no timed step has."""

    checks = True


@cheat("gradients", "implausible", "the first backward of a forward runs", case=case_of(32, batch=1))
class WeightsOfTheFirstBackwardOfFewTokens(Plain):
    """Computes weights in the first backward of a forward, where calls are so short that times hardly tell."""

    def attention(self, case: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept: list[Tensor] = []

        def weights(d_out: Tensor) -> Tensor:
            kept[:] = kept or [torch.softmax(q.detach() @ k.detach().mT * case.head_dim**-0.5, -1)]
            return d_out

        return passed(attend(case, q, k, v), weights)
