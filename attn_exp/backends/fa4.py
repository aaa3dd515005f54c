"""FlashAttention 4, the package `flash-attn-4`: kernels in CuTe's Python DSL for Hopper and Blackwell."""

from dataclasses import replace
from functools import partial

import torch

from attn_exp.attention.inputs import Inputs, sinks_in
from attn_exp.backends.base import FUSED_SHARE, Calls, Reproducible
from attn_exp.backends.bshd import BshdAttention, bshd_calls, flash_window, sequence_starts, unbatched
from attn_exp.backends.package import Package, Refused
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case

_HOPPER = 9


class FlashAttention4(Reproducible):
    """FlashAttention 4 of the package flash-attn-4, called directly; compiled at the first call of each pass.

    Written against 4.0.0b36, and run with it on an H200. `deterministic` selects the backward that sums in a fixed
    order.
    """

    # flash_attn/cute/interface.py, _validate_head_dims, allows all pairs of 8 to 256 in steps of 8 on Hopper. The pairs
    # here are correct on an H200 with 4.0.0b36. Among the others, 40 and 72 get a wrong dq, 128 with 64 an inaccurate
    # one, and 64 with 128 has no backward.
    supports = Supports(
        align=("bottom_right",),
        masks=("window",),
        # Empty sequences: https://github.com/Dao-AILab/flash-attention/blob/0251105/tests/cute/test_flash_attn.py,
        # `zero_lengths_q`.
        features=("softcap", "sink", "packed", "empty_requests"),
        head_dims=(64, 96, 128, 256),
        value_dims=((192, 128), (256, 128)),
        # 8.x and 12.x have kernels too, but 8.x has no backward and 12.x neither splits nor a deterministic backward.
        capabilities=(9, 10, 11),
    )
    # Also from _validate_head_dims.
    on_blackwell = replace(supports, value_dims=((192, 128),))
    package = Package("flash-attn-4", "flash_attn.cute", 'pip install --pre "flash-attn-4>=4.0.0b36,<5"')
    claimed_share = FUSED_SHARE
    # FlashAttentionBackwardPreprocess runs before any backward, so the claim names the kernel that computes the
    # gradients.
    claims = {
        ("cuda", "forward"): r"FlashAttentionForwardSm",
        ("cuda", "backward"): r"FlashAttentionBackwardSm|BlackwellFusedMultiHeadAttentionBackward",
    }

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse pairs of head dimensions that Blackwell lacks. `prepare` refuses what lacks only a backward."""
        refusal = super().unsupported(case, device)
        if refusal is None and case.sink and case.head_dim == 256 and torch.cuda.get_device_capability()[0] > _HOPPER:
            # flash_attn/cute/interface.py: "SM100 forward with head_dim=256 does not support learnable_sink"
            return f"{self.name} has no sinks with head dimensions of 256 on Blackwell: set sink=false"
        if refusal is not None or case.head_dim == case.value_dim:
            return refusal
        if torch.cuda.get_device_capability()[0] > _HOPPER:
            narrower = self.on_blackwell.refusal(case, device)
            return f"{self.name} {narrower} on Blackwell" if narrower else None
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the sequence starts once, untimed."""
        cute = self.package.load()
        unlike = case.head_dim != case.value_dim and case.q_heads != case.kv_heads
        if unlike and inputs.q_bhsd.requires_grad and torch.cuda.get_device_capability()[0] == _HOPPER:
            # flash_attn/cute/flash_bwd_sm90.py: "GQA backward requires head_dim == head_dim_v"
            raise Refused("no backward for grouped heads of different dimensions: set passes=[forward]")
        left, right = flash_window(causal=case.causal, window=case.window)
        sinks = sinks_in(case, inputs)
        options = {
            "causal": case.causal,
            "window_size": (left if left >= 0 else None, right if right >= 0 else None),
            # Its gradient is returned as those of q, k and v.
            "learnable_sink": None if sinks is None else sinks.flatten(),
            "softcap": case.softcap or 0.0,
            "deterministic": self.deterministic,
        }
        if case.lengths is None:
            return bshd_calls(_output(partial(cute.flash_attn_func, **options)), inputs)
        starts, longest = sequence_starts(case, inputs.q_bhsd.device), max(case.lengths)
        packed = partial(
            cute.flash_attn_varlen_func,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        return bshd_calls(unbatched(_output(packed)), inputs)


def _output(attention: BshdAttention) -> BshdAttention:
    """Drop the log-sum-exp, which the library returns with the output."""

    def output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v)[0]

    return output
