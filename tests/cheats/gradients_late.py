"""Backwards that are wrong in few places: in one row of the batch, in few calls, or before they are called."""

from dataclasses import replace
from typing import Any

import torch

from cheats.corpus import case_of, cheat
from cheats.gradients import slow_weights
from cheats.ways import Plain, Run, Tensor


@torch.no_grad()
def gradients(p: Tensor, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of the weights p."""
    dp = d_out @ v.mT
    ds = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p).mul_(q.shape[-1] ** -0.5)
    return ds @ k, ds.mT @ q, p.mT @ d_out


@cheat("gradients", "implausible", "the first backward of a forward takes", case=case_of(512, batch=1))
class WeightsWhileTheBackwardIsMade(Plain):
    """Computes the weights when it is asked for a backward, before that is called: each call only multiplies."""

    def prepare(self, case: Any, inputs: Any) -> Any:
        q, k, v = (one.detach() for one in inputs.qkv)

        def backward(out: Tensor) -> Run:
            p = slow_weights(q, k).to(q.dtype)
            return lambda: gradients(p, q, k, v, inputs.d_out)

        return replace(super().prepare(case, inputs), backward=backward)
