"""Backwards that are wrong in few places: in one row of the batch, in few calls, or before they are called."""

import random
from dataclasses import replace
from typing import Any

import torch

from cheats.corpus import FORWARD, case_of, cheat
from cheats.gradients import slow_weights
from cheats.ways import Plain, Run, StraightTanh, Tensor, attend


@torch.no_grad()
def gradients(p: Tensor, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of the weights p."""
    dp = d_out @ v.mT
    ds = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p).mul_(q.shape[-1] ** -0.5)
    return ds @ k, ds.mT @ q, p.mT @ d_out


@cheat("gradients", "implausible", "ran while the backward was made", case=case_of(128, batch=1))
class WeightsWhileTheBackwardIsMade(Plain):
    """Computes the weights when it is asked for a backward, before that is called: each call only multiplies."""

    def prepare(self, case: Any, inputs: Any) -> Any:
        q, k, v = (one.detach() for one in inputs.qkv)

        def backward(out: Tensor) -> Run:
            p = slow_weights(q, k).to(q.dtype)
            return lambda: gradients(p, q, k, v, inputs.d_out)

        return replace(super().prepare(case, inputs), backward=backward)


@cheat(
    "gradients",
    "inaccurate",
    r"on hard values .*(dq|dk) .*(row \d of the batch|of its norm)",
    case=case_of(256, dtype="bfloat16", causal=True, softcap=50.0, batch=4),
)
class SlopeLostInTheLastRowOfTheBatch(Plain):
    """Leaves out the softcap's slope in the last row of the batch, in the backward: a stride that was forgotten."""

    def backward(self, run: Run) -> Any:
        q, k, v = (one.detach()[-1:].requires_grad_() for one in self.inputs.qkv)
        with torch.enable_grad():
            out = attend(self.case, q, k, v, tanh=StraightTanh.apply)
            last = torch.autograd.grad(out, (q, k, v), self.inputs.d_out[-1:])
        return tuple(torch.cat([one[:-1], other]) for one, other in zip(run(), last, strict=True))


class _Racing(Plain):
    """Errs in one head, another one each time, in all calls but the first two, which are judged before the timing."""

    calls = 0

    def head(self) -> tuple[int, int] | None:
        """Return the head in which this call errs, if it does."""
        self.calls += 1
        dice = random.SystemRandom()
        if self.calls <= 2:
            return None
        return dice.randrange(self.case.batch), dice.randrange(self.case.q_heads)


@cheat("parts", "inaccurate", r"\bout\b", passes=FORWARD)
class RaceOfTwoPartsOfTheKeys(_Racing):
    """Loses the last quarter of the keys in one head, another one each time, after the first two calls."""

    def forward(self, run: Run) -> Any:
        out, head = run(), self.head()
        if head is not None:
            q, k, v = (one.detach()[head] for one in self.inputs.qkv)
            seen = self.case.kv_len * 3 // 4
            out[head] = torch.softmax(q @ k[:seen].mT * self.case.head_dim**-0.5, -1) @ v[:seen]
        return out


@cheat("gradients", "inaccurate", r"\bdkT? ")
class RaceOfTwoGradients(_Racing):
    """Loses dk of one head, another one each time, after the first two calls."""

    def backward(self, run: Run) -> Any:
        (dq, dk, dv), head = run(), self.head()
        if head is not None:
            dk[head] = 0
        return dq, dk, dv
