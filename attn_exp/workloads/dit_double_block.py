"""dit_double_block: a double-stream block of FLUX.1's diffusion transformer, which has 19 of them before its 38 others.

Shapes from black-forest-labs/flux, src/flux/modules/layers.py (DoubleStreamBlock, Modulation, SelfAttention, QKNorm)
and src/flux/util.py: width 3,072 in 24 heads of 128, MLP 12,288. Text and image have weights of their own, and attend
to each other in one attention. For each stream one vector gives six modulations: shift, scale and gate of the attention
and of the MLP. FLUX's positions have three axes (16 + 56 + 56 dimensions), here one, with the same arithmetic. FLUX
hands the streams on as two tensors; here they are parts of one, as in its single-stream blocks, which costs a copy.
"""

import torch
from torch import nn
from torch.nn import functional as F

from attn_exp.attention.inputs import Attention
from attn_exp.core.case.case import Case
from attn_exp.workloads.block import RotaryBlock

_EPS = 1e-6
# 512 of FLUX's 4,608 tokens are text.
_TEXT_SHARE = 9


class DitDoubleBlock(RotaryBlock):
    """Maps tokens x (batch, length, width), text first, and a modulating vector (batch, width) to tokens."""

    # The weights that set the scores' scale.
    sharpened = tuple(f"{stream}.{name}_norm.weight" for stream in ("text", "image") for name in ("query", "key"))

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.text, self.image = (_Stream(self.heads, self.head_dim, self.mlp_dim) for _ in range(2))

    def forward(self, attention: Attention, x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
        """Compute the block with an attention of (batch, heads, length, dim)."""
        of_text = max(1, x.shape[1] // _TEXT_SHARE)
        streams = ((self.text, x[:, :of_text]), (self.image, x[:, of_text:]))
        modulations = [stream.modulations(vec) for stream, _ in streams]
        projected = [
            stream.qkv(tokens, modulation) for (stream, tokens), modulation in zip(streams, modulations, strict=True)
        ]
        q, k, v = (torch.cat(parts, dim=1) for parts in zip(*projected, strict=True))
        attended = self.attended(attention, q, k, v)
        parts = (attended[:, :of_text], attended[:, of_text:])
        made = [
            stream.after(tokens, part, modulation)
            for (stream, tokens), part, modulation in zip(streams, parts, modulations, strict=True)
        ]
        return torch.cat(made, dim=1)


class _Stream(nn.Module):
    """The layers of one stream, text or image."""

    def __init__(self, heads: int, head_dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.heads, self.width = heads, heads * head_dim
        self.modulation = nn.Linear(self.width, 6 * self.width)
        self.qkv_linear = nn.Linear(self.width, 3 * self.width)
        self.query_norm = nn.RMSNorm(head_dim, eps=_EPS)
        self.key_norm = nn.RMSNorm(head_dim, eps=_EPS)
        self.proj = nn.Linear(self.width, self.width)
        self.mlp_in = nn.Linear(self.width, mlp_dim)
        self.mlp_out = nn.Linear(mlp_dim, self.width)

    def modulations(self, vec: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return shift, scale and gate of the attention, then of the MLP, each (batch, 1, width)."""
        made: tuple[torch.Tensor, ...] = self.modulation(F.silu(vec))[:, None].chunk(6, dim=-1)
        return made

    def qkv(self, tokens: torch.Tensor, modulation: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return q, k and v (batch, length, heads, dim), q and k normalised."""
        modulated = self._modulated(tokens, *modulation[:2])
        q, k, v = self.qkv_linear(modulated).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.query_norm(q), self.key_norm(k), v

    def after(self, tokens: torch.Tensor, attended: torch.Tensor, modulation: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the stream's tokens after its part of the attention and its MLP."""
        _, _, gate, shift, scale, mlp_gate = modulation
        tokens = tokens + gate * self.proj(attended)
        hidden = F.gelu(self.mlp_in(self._modulated(tokens, shift, scale)), approximate="tanh")
        made: torch.Tensor = tokens + mlp_gate * self.mlp_out(hidden)
        return made

    def _modulated(self, tokens: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (1 + scale) * F.layer_norm(tokens, (self.width,), eps=_EPS) + shift
