"""dit_block: a single-stream block of FLUX.1's diffusion transformer, which has 38 of them and 19 double-stream blocks.

Shapes from black-forest-labs/flux, src/flux/modules/layers.py (SingleStreamBlock, Modulation, QKNorm) and
src/flux/util.py: width 3,072 in 24 heads of 128, MLP 12,288. One projection computes QKV and the MLP's first half,
another takes attention's output and the MLP's second half, concatenated, behind one gate. LayerNorm has no weights and
is modulated by a vector (adaLN-Zero, arXiv:2212.09748); queries and keys have RMS norms. FLUX's positions have three
axes (16 + 56 + 56 dimensions), here one, with the same arithmetic.
"""

import torch
from torch import nn
from torch.nn import functional as F

from attn_exp.attention.inputs import Attention
from attn_exp.core.case.case import Case
from attn_exp.workloads.block import RotaryBlock

_EPS = 1e-6


class DitBlock(RotaryBlock):
    """Maps tokens x (batch, length, width) and a modulating vector (batch, width) to tokens."""

    # The weights that set the scores' scale.
    sharpened = ("query_norm.weight", "key_norm.weight")

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.modulation = nn.Linear(self.width, 3 * self.width)
        self.linear1 = nn.Linear(self.width, 3 * self.width + self.mlp_dim)
        self.linear2 = nn.Linear(self.width + self.mlp_dim, self.width)
        self.query_norm = nn.RMSNorm(self.head_dim, eps=_EPS)
        self.key_norm = nn.RMSNorm(self.head_dim, eps=_EPS)

    def forward(self, attention: Attention, x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
        """Compute the block with an attention of (batch, heads, length, dim)."""
        shift, scale, gate = self.modulation(F.silu(vec))[:, None].chunk(3, dim=-1)
        modulated = (1 + scale) * F.layer_norm(x, (self.width,), eps=_EPS) + shift
        qkv, mlp = self.linear1(modulated).split([3 * self.width, self.mlp_dim], dim=-1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        attended = self.attended(attention, self.query_norm(q), self.key_norm(k), v)
        made: torch.Tensor = self.linear2(torch.cat([attended, F.gelu(mlp, approximate="tanh")], dim=-1))
        out: torch.Tensor = x + gate * made
        return out
