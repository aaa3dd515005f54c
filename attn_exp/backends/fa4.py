"""FlashAttention 4, the package `flash-attn-4`: kernels in CuTe's Python DSL for Hopper and Blackwell."""

from dataclasses import replace
from functools import partial

import torch

from attn_exp.backends.base import Calls, Described
from attn_exp.backends.bshd import BshdAttention, bshd_calls, flash_window, sequence_starts, unbatched
from attn_exp.backends.package import Package
from attn_exp.backends.supports import Supports
from attn_exp.case import Case
from attn_exp.inputs import Inputs


class FlashAttention4(Described):
    """`flash_attn.cute`, called directly; kernels are compiled at the first call of each pass.

    Run on an H200 with 4.0.0b36, the release that this is written against. `deterministic` takes the backward that adds
    up in a fixed order.
    """

    supports = Supports(
        align=("bottom_right",),
        window=True,
        softcap=True,
        packed=True,
        # flash_attn/cute/interface.py, _validate_head_dims: 8 to 256 in steps of 16 bytes on Hopper.
        largest_head_dim=256,
        head_dim_multiple=8,
        value_dims="any",
        capability=(9, 0),
        # 8.x and 12.x have kernels too, but 8.x no backward and 12.x neither splits nor a deterministic one.
        capabilities=(9, 10, 11),
    )
    # The same place: up to 128, both 256, or 192 and 128.
    on_blackwell = replace(supports, largest_head_dim=128, value_dims="any")
    package = Package("flash-attn-4", "flash_attn.cute", 'pip install --pre "flash-attn-4>=4.0.0b36,<5"')
    # FlashAttentionBackwardPreprocess runs before any backward, so the claim names the one that computes.
    claims = {
        ("cuda", "forward"): r"FlashAttentionForwardSm",
        ("cuda", "backward"): r"FlashAttentionBackwardSm|BlackwellFusedMultiHeadAttentionBackward",
    }

    def __init__(self, name: str, deterministic: bool = False) -> None:
        super().__init__(name)
        self.deterministic = deterministic

    def unsupported(self, case: Case, device: str) -> str | None:
        """As declared; Blackwell has other head dimensions than Hopper."""
        refusal = super().unsupported(case, device)
        if refusal is None and torch.cuda.get_device_capability()[0] >= 10:
            if (case.head_dim, case.value_dim) in ((192, 128), (256, 256)):
                return None
            narrower = self.on_blackwell.refusal(case, device)
            return f"{self.name} {narrower} on Blackwell" if narrower else None
        return refusal

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Sequence starts are made once, and not timed."""
        cute = self.package.load()
        left, right = flash_window(causal=case.causal, window=case.window)
        options = {
            "causal": case.causal,
            "window_size": (left if left >= 0 else None, right if right >= 0 else None),
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
    """It returns the log-sum-exp too."""

    def output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v)[0]

    return output
