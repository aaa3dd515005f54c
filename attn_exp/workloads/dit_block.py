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

from attn_exp.attention.autograd import Attention
from attn_exp.core.case import Case
from attn_exp.workloads.rotary import rotary_tables, rotate

_EPS = 1e-6
_ROTARY_BASE = 10_000.0


class DitBlock(nn.Module):
    """Maps tokens x (batch, length, width) and a modulating vector (batch, width) to tokens."""

    operand_names = ("x", "vec")
    # The weights that set the scores' scale.
    sharpened = ("query_norm.weight", "key_norm.weight")

    def __init__(self, case: Case) -> None:
        super().__init__()
        assert case.mlp_dim is not None
        self.heads, self.head_dim = case.q_heads, case.head_dim
        self.width, self.mlp_dim = case.q_heads * case.head_dim, case.mlp_dim
        self.modulation = nn.Linear(self.width, 3 * self.width)
        self.linear1 = nn.Linear(self.width, 3 * self.width + self.mlp_dim)
        self.linear2 = nn.Linear(self.width + self.mlp_dim, self.width)
        self.query_norm = nn.RMSNorm(self.head_dim, eps=_EPS)
        self.key_norm = nn.RMSNorm(self.head_dim, eps=_EPS)
        self.tables = torch.empty(0)

    def operand_shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        """Return the shapes of x and vec."""
        return {"x": (case.batch, case.q_len, self.width), "vec": (case.batch, self.width)}

    def place(self, case: Case, device: torch.device) -> None:
        """Build the rotary tables, which are no weights."""
        self.tables = rotary_tables(case.q_len, self.head_dim, _ROTARY_BASE, device)

    def forward(self, attention: Attention, x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
        """Compute the block with an attention of (batch, heads, length, dim)."""
        shift, scale, gate = self.modulation(F.silu(vec))[:, None].chunk(3, dim=-1)
        modulated = (1 + scale) * F.layer_norm(x, (self.width,), eps=_EPS) + shift
        qkv, mlp = self.linear1(modulated).split([3 * self.width, self.mlp_dim], dim=-1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        q, k = rotate(self.query_norm(q), self.tables), rotate(self.key_norm(k), self.tables)
        attended = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)
        made: torch.Tensor = self.linear2(torch.cat([attended, F.gelu(mlp, approximate="tanh")], dim=-1))
        out: torch.Tensor = x + gate * made
        return out
