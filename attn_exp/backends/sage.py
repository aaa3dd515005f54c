"""SageAttention 1 from the package `sageattention`: int8 scores in Triton. Forward only."""

from functools import partial
from typing import Any

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend, calls_of
from attn_exp.backends.package import Package
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import INT8, Case

# Keys of a tile (sageattention/attn_qk_int8_per_block.py, BLOCK_N).
_TILE = 64


class Sage(DeclarativeBackend):
    """SageAttention 1: float16 tensors whose scores are int8 products, quantised inside of the timed call.

    Written against 1.0.6 (sageattention/core.py). `smooth_k` subtracts the keys' mean before they are quantised. 1.0.6
    writes the difference into the caller's k, which a second call would not repeat; here it is a new tensor, as in
    later versions.
    """

    supports = Supports(
        dtypes=(INT8,),
        passes=("forward",),
        # is_causal is "only applicable when qo_len == kv_len".
        align=(),
        head_dims=(64, 96, 128),
        capability=(8, 0),
    )
    package = Package("sageattention", "sageattention.core", 'pip install "sageattention>=1.0.6,<2"')
    generates_triton = True
    # Quantising takes three kernels and the keys' mean.
    claimed_share = FUSED_SHARE
    claims = {("cuda", "forward"): r"^_attn_fwd"}

    def __init__(self, name: str, smooth_k: bool = True) -> None:
        super().__init__(name)
        self.smooth_k = smooth_k

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse what it would compute wrongly."""
        refusal = super().unsupported(case, device)
        if refusal is None and case.dense and case.kv_len % _TILE:
            # The kernel without a mask gives keys beyond the last a score of 0 in place of minus infinity.
            return f"{self.name} needs multiples of {_TILE} keys without a mask, not {case.kv_len}"
        return refusal

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the calls; kernels are compiled at the first call."""
        sage = self.package.load()
        # The mask of a decode step hides nothing, and it may have more keys than queries.
        library = partial(sage.sageattn, tensor_layout="HND", is_causal=not case.dense, smooth_k=False)
        return calls_of(partial(_attention, library, self.smooth_k), inputs)


def _attention(library: Any, smooth_k: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = library(q, k - k.mean(dim=2, keepdim=True) if smooth_k else k, v)
    return out
