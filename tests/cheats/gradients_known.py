"""Steps whose forward computes the gradients at once, of the output's gradient that lies in memory already."""

from functools import partial
from typing import Any

import torch

from attn_exp.attention.autograd import autograd_backward
from attn_exp.backends.base import Calls
from cheats.corpus import cheat
from cheats.gradients_late import gradients
from cheats.ways import Plain, Tensor

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
