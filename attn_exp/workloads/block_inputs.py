"""The inputs of a block: its weights, its operands, and its output's gradient."""

import copy
from dataclasses import dataclass
from typing import Any

import torch


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
