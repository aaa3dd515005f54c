"""Give a dispatcher's attention to transformers, which has an interface for attention functions since 4.48."""

from collections.abc import Callable
from typing import Any

import torch

from attn_exp.core.errors import UserError

# Arguments that the function here does not know; transformers' own for SDPA does.
_OTHERS = ("softcap", "position_bias", "cache")


def register(attention: Callable[..., torch.Tensor], name: str) -> str:
    """Register an attention with SDPA's arguments under a name, with the masks that transformers makes for SDPA.

    Raises UserError if transformers is not installed, or too old for an AttentionInterface.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise UserError(
            f"transformers with an AttentionInterface is missing ({error}): pip install transformers"
        ) from error

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of tensors (batch, heads, length, dim), as (batch, length, heads, dim)."""
        if attention_mask is not None or any(more.get(one) is not None for one in _OTHERS):
            theirs: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
            )
            return theirs
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # One query is the last one, and sees every key. Not in one expression: Dynamo's symbols are no bools.
        if query.shape[2] == 1:
            causal = False
        if causal and key.shape[2] > query.shape[2]:
            # A static cache before the first token: what is behind the prompt is empty.
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        out = attention(
            query, key, value,
            dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
