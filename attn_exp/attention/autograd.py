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


class Accumulator:
    """Adds gradients to those of earlier calls, as autograd does for leaves whose `.grad` is kept.

    A sum lies in memory as its leaf does, so that adding reads and writes the gradients as `AccumulateGrad` does: one
    elementwise kernel for each. The gradients of a call themselves stay what they are.
    """

    def __init__(self, inputs: DifferentiableInputs) -> None:
        self.sums = tuple(torch.zeros_like(leaf, requires_grad=False) for leaf in inputs.leaves)

    def backward(self, call: Callable[[], Gradients]) -> Callable[[], Gradients]:
        """Return a backward that also adds its gradients to the sums."""

        def accumulating() -> Gradients:
            gradients = call()
            with torch.no_grad():
                for kept, gradient in zip(self.sums, gradients, strict=True):
                    kept.add_(gradient)
            return gradients

        return accumulating
