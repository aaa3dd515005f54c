"""What blocks share: their inputs, and the rotary positions around their attention."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attn_exp.attention.autograd import Attention
from attn_exp.core.case.case import Case


@dataclass(frozen=True)
class BlockInputs:
    """A block with its weights and operands, and its output's gradient (batch, length, width)."""

    block: Any
    operands: tuple[torch.Tensor, ...]
    d_out: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return the operands and all weights, in the order of `gradient_names`."""
        return (*self.operands, *self.block.parameters())

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Return the gradients' names: `dx`, and `d_wq_weight` for the weight `wq.weight`."""
        weights = [f"d_{name.replace('.', '_')}" for name, _ in self.block.named_parameters()]
        return (*(f"d{name}" for name in self.block.operand_names), *weights)

    def to(self, precision: torch.dtype) -> "BlockInputs":
        """Return a copy of the same numbers in another precision."""
        operands = (one.detach().to(precision).requires_grad_(one.requires_grad) for one in self.operands)
        return BlockInputs(copy.deepcopy(self.block).to(precision), tuple(operands), self.d_out.to(precision))

    def first(self, tokens: int) -> "BlockInputs":
        """Return the first tokens of one row of the batch; the weights are shared."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            # A vector that modulates all tokens has no length dimension.
            part = tensor.detach()[:1, :tokens] if tensor.ndim == self.d_out.ndim else tensor.detach()[:1]
            return part.contiguous().requires_grad_(tensor.requires_grad)

        return BlockInputs(self.block, tuple(cut(one) for one in self.operands), cut(self.d_out))


class RotaryBlock(nn.Module):
    """A block whose attention has rotary positions, of tokens x (batch, length, width) and perhaps of a vector."""

    operand_names: tuple[str, ...] = ("x", "vec")
    rotary_base = 10_000.0

    def __init__(self, case: Case) -> None:
        super().__init__()
        assert case.mlp_dim is not None
        self.heads, self.head_dim, self.mlp_dim = case.q_heads, case.head_dim, case.mlp_dim
        self.width = case.q_heads * case.head_dim
        self.tables = torch.empty(0)

    def operand_shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        """Return the shapes of x, and of a vector that modulates all tokens."""
        return {"x": (case.batch, case.q_len, self.width), "vec": (case.batch, self.width)}

    def place(self, case: Case, device: torch.device) -> None:
        """Build the rotary tables, which are no weights."""
        self.tables = rotary_tables(case.q_len, self.head_dim, self.rotary_base, device)

    def attended(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention (batch, length, width) of q, k and v (batch, length, heads, dim)."""
        q, k = rotate(q, self.tables), rotate(k, self.tables)
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


def rotary_tables(length: int, dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Return cosines and sines, (2, length, 1, dim / 2) in float32, the same numbers for every precision."""
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).float().unsqueeze(2)


def rotate(x_bshd: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of dimensions by its position's angle, in at least float32; the result has x's dtype."""
    cos, sin = tables[:, : x_bshd.shape[1]]
    wide = torch.promote_types(x_bshd.dtype, torch.float32)
    even, odd = x_bshd.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x_bshd.dtype)
