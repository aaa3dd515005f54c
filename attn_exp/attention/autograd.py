"""Types of attention functions and their gradients, and the backward pass by autograd."""

from collections.abc import Callable
from functools import partial

import torch

from attn_exp.attention.inputs import DifferentiableInputs

# dq, dk and dv; for a block, the gradients of its inputs and weights.
Gradients = tuple[torch.Tensor, ...]


# Maps q, k and v, indexed (batch, heads, length, dim) in any layout, to the output with the same indices.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# The same for any number of tensors.
Function = Callable[..., torch.Tensor]


def autograd_backward(inputs: DifferentiableInputs, out: torch.Tensor) -> Callable[[], Gradients]:
    """Return a call of `torch.autograd.grad` on an output; gradients do not accumulate."""
    return partial(torch.autograd.grad, out, inputs.leaves, inputs.d_out, retain_graph=True)
