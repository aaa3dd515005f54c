"""decoder_layer: a layer of a llama: RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU.

Shapes of Llama 3 8B from arXiv:2407.21783, table 3: width 4,096 in 32 query and 8 key-value heads of 128, MLP 14,336,
rotary base 500,000, no biases. The layer follows meta-llama/llama3, llama/model.py (TransformerBlock).
"""

import torch
from torch import nn
from torch.nn import functional as F

from attn_exp.attention.inputs import Attention
from attn_exp.core.case.case import Case
from attn_exp.workloads.block import RotaryBlock

_EPS = 1e-5


class DecoderLayer(RotaryBlock):
    """Maps tokens x (batch, length, width) to tokens."""

    operand_names = ("x",)
    rotary_base = 500_000.0
    # The weights that set the scores' scale.
    sharpened = ("wq.weight", "wk.weight")

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        kv_width = case.kv_heads * case.head_dim
        self.attention_norm = nn.RMSNorm(self.width, eps=_EPS)
        self.wq = nn.Linear(self.width, self.width, bias=False)
        self.wk = nn.Linear(self.width, kv_width, bias=False)
        self.wv = nn.Linear(self.width, kv_width, bias=False)
        self.wo = nn.Linear(self.width, self.width, bias=False)
        self.mlp_norm = nn.RMSNorm(self.width, eps=_EPS)
        self.w1 = nn.Linear(self.width, self.mlp_dim, bias=False)
        self.w2 = nn.Linear(self.mlp_dim, self.width, bias=False)
        self.w3 = nn.Linear(self.width, self.mlp_dim, bias=False)

    def forward(self, attention: Attention, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer with an attention of (batch, heads, length, dim)."""
        normed = self.attention_norm(x)
        q, k, v = (linear(normed).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        x = x + self.wo(self.attended(attention, q, k, v))
        normed = self.mlp_norm(x)
        made: torch.Tensor = x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return made
