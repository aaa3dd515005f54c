"""TransformerEngine's `DotProductAttention`, which chooses between cuDNN, FlashAttention and an unfused formula."""

from functools import partial

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend
from attn_exp.backends.bshd import BshdAttention, bshd_calls, flash_window, sequence_starts, unbatched
from attn_exp.backends.package import Package
from attn_exp.backends.sdpa import Cudnn
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case


class TransformerEngine(DeclarativeBackend):
    """TransformerEngine's `DotProductAttention` with its own choice of kernel.

    Never run: transformer_engine_torch has no wheel, and was not built. Written against 2.20.2
    (pytorch/attention/dot_product_attention/dot_product_attention.py and utils.py); tested with a stand-in. On
    Hopper it prefers cuDNN to FlashAttention; `NVTE_FUSED_ATTN`, `NVTE_FLASH_ATTN` and
    `NVTE_ALLOW_NONDETERMINISTIC_ALGO` in the environment change that.
    """

    supports = Supports(
        masks=("window",),
        # cuDNN's path has no softcap; FlashAttention computes it where it is installed.
        features=("softcap", "packed"),
        largest_head_dim=256,
        head_dim_multiple=8,
        value_dims="any",
        capability=(8, 0),
    )
    package = Package(
        "transformer-engine",
        "transformer_engine.pytorch",
        'pip install --no-build-isolation "transformer-engine[pytorch]>=2.20,<3"',
    )
    claimed_share = FUSED_SHARE
    # The unfused formula, its fallback, launches kernels with other names.
    claims = {
        key: f"{Cudnn.claims[key]}|{own}"
        for key, own in (
            (("cuda", "forward"), r"flash_fwd|FlashAttnFwd|FlashAttentionForward"),
            (("cuda", "backward"), r"flash_bwd|FlashAttnBwd|FlashAttentionBackwardSm"),
        )
    }

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the module and the sequence starts once, untimed."""
        engine = self.package.load()
        left, right = flash_window(causal=case.causal, window=case.window)
        module = engine.DotProductAttention(
            num_attention_heads=case.q_heads,
            kv_channels=(case.head_dim, case.value_dim),
            num_gqa_groups=case.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd" if case.lengths is None else "thd",
            attn_mask_type=mask_type(case),
            window_size=(left, right),
            softcap=case.softcap or 0.0,
            attention_type="self" if case.square else "cross",
        )
        if case.lengths is None:
            return bshd_calls(_split_heads(module, case), inputs)
        starts, longest = sequence_starts(case, inputs.q_bhsd.device), max(case.lengths)
        packed = partial(module, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest)
        return bshd_calls(unbatched(_split_heads(packed, case)), inputs)


def mask_type(case: Case) -> str:
    """Return `attn_mask_type`.

    Packed sequences need a `padding` type although nothing is padded. Each of them is square, so alignments agree.
    """
    if case.lengths is not None:
        return "padding_causal" if case.causal else "padding"
    if not case.causal:
        return "no_mask"
    return "causal" if case.square or case.align == "top_left" else "causal_bottom_right"


def _split_heads(module: BshdAttention, case: Case) -> BshdAttention:
    """Split the heads of an output (..., heads * dim)."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(q, k, v).unflatten(-1, (case.q_heads, case.value_dim))
        return out

    return attention
