"""Backwards that are done elsewhere, or read what an earlier call left."""

from collections.abc import Callable
from functools import partial

import torch

from attn_exp.attention.inputs import Gradients, Inputs
from attn_exp.backends.base import Calls
from attn_exp.core.case.case import Case
from cheats.corpus import BOTH
from cheats.gpu.base import NOTHING, WRONG, Formula, any_of, gpu_cheat

_KEPT = ("inaccurate", "wrong_kernel", "implausible")
_KEPT_WORDS = any_of(WRONG, NOTHING, "above the|faster than")


class ByHand(Formula):
    """The backward as FlashAttention writes it, from the log-sum-exp that the forward kept; in float32."""

    # Whether each forward refreshes the log-sum-exp, and the backward the rows' sums of d_out times out.
    fresh_lse = fresh_delta = True
    # Whether all forwards keep their log-sum-exp at one place.
    one_place = False

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        # By what is kept, and for the log-sum-exp by where the output lies.
        kept: dict[str | int, torch.Tensor] = {}

        def scores() -> torch.Tensor:
            return inputs.q_bhsd.detach().float() @ inputs.k_bhsd.detach().float().mT * case.head_dim**-0.5

        def forward() -> torch.Tensor:
            found = scores()
            lse = found.logsumexp(-1, keepdim=True)
            out = (torch.exp(found - lse) @ inputs.v_bhsd.detach().float()).to(inputs.v_bhsd.dtype)
            if self.fresh_lse or not kept:
                kept[self.place(out)] = lse
            return out

        def backward(out: torch.Tensor) -> Callable[[], Gradients]:
            return partial(self.by_hand, case, inputs, scores, kept, out)

        return Calls(forward, backward, scope=self.scope, inputs=inputs)

    def place(self, out: torch.Tensor) -> int:
        """Return the key of an output's log-sum-exp."""
        return 0 if self.one_place or not self.fresh_lse else out.data_ptr()

    def by_hand(
        self,
        case: Case,
        inputs: Inputs,
        scores: Callable[[], torch.Tensor],
        kept: dict[str | int, torch.Tensor],
        out: torch.Tensor,
    ) -> Gradients:
        """Return dq, dk and dv."""
        q, k, v, d_out = (tensor.detach().float() for tensor in (*inputs.qkv, inputs.d_out))
        p = torch.exp(scores() - kept[self.place(out)])
        delta = (d_out * out.detach().float()).sum(-1, keepdim=True)
        if self.fresh_delta or "delta" not in kept:
            kept["delta"] = delta
        ds = p * (d_out @ v.mT - kept["delta"])
        scale = case.head_dim**-0.5
        return tuple(
            found.to(inputs.v_bhsd.dtype) for found in (self.dq_of(ds, k) * scale, ds.mT @ q * scale, p.mT @ d_out)
        )

    def dq_of(self, ds: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return dq without its factor."""
        return ds @ k


@gpu_cheat("gradients", "inaccurate", WRONG, passes=BOTH)
class LogSumExpOfTheFirstForward(ByHand):
    """The backward reads the log-sum-exp that the first forward stored."""

    fresh_lse = False
