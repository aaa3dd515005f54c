"""PyTorch's `torch.nn.attention.varlen.varlen_attn`: FlashAttention 2 of sequences without a batch."""

import inspect
from functools import partial

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import FUSED_SHARE, Calls, Reproducible
from attn_exp.backends.bshd import bshd_calls, flash_window, starts_of, unbatched
from attn_exp.backends.package import Package
from attn_exp.backends.sdpa import Flash, deterministic_algorithms
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case


class Varlen(Reproducible):
    """PyTorch's `varlen_attn`, which has no dimension for a batch: all sequences lie behind each other.

    A case without `lengths` is one of equally long sequences. The kernels are those of `flash`, whose masks it aligns
    bottom-right.
    """

    # aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd.
    supports = Supports(
        align=("bottom_right",),
        masks=("window",),
        features=("packed", "ragged"),
        largest_head_dim=256,
        head_dim_multiple=8,
        capability=(8, 0),
    )
    package = Package("torch", "torch.nn.attention.varlen", "pip install 'torch>=2.11'")
    claimed_share = FUSED_SHARE
    claims = {key: claim for key, claim in Flash.claims.items() if key[0] == "cuda"}

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the sequence starts once, untimed."""
        function = self.package.load().varlen_attn
        takes = inspect.signature(function).parameters
        # Before torch 2.12 it takes grouped heads without being told.
        grouped = {"enable_gqa": case.q_heads != case.kv_heads} if "enable_gqa" in takes else {}
        q_lengths = case.lengths or (case.q_len,) * case.batch
        kv_lengths = case.kv_lengths or case.lengths or (case.kv_len,) * case.batch
        device = inputs.q_bhsd.device
        attention = partial(
            function,
            cu_seq_q=starts_of(q_lengths, device),
            cu_seq_k=starts_of(kv_lengths, device),
            max_q=max(q_lengths),
            max_k=max(kv_lengths),
            window_size=flash_window(causal=case.causal, window=case.window),
            **grouped,
        )
        return bshd_calls(unbatched(attention), inputs, scope=partial(deterministic_algorithms, self.deterministic))
