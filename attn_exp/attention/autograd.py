"""Types of attention functions and their gradients, and the backward pass by autograd."""

from collections.abc import Callable
from functools import partial

import torch

from attn_exp.attention.inputs import DifferentiableInputs

# dq, dk and dv; of a block, those of its inputs and weights.
Gradients = tuple[torch.Tensor, ...]


# From q, k and v, indexed (batch, heads, length, dim) whatever their layout, to the output likewise.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# The same of any number of tensors.
Function = Callable[..., torch.Tensor]


def autograd_backward(inputs: DifferentiableInputs, out: torch.Tensor) -> Callable[[], Gradients]:
    """A call of `torch.autograd.grad` on a real output, without gradients accumulating."""
    return partial(torch.autograd.grad, out, inputs.leaves, inputs.d_out, retain_graph=True)
