"""How the gradient of an output may lie in memory: as the operators after the attention in a model leave it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attn_exp.attention.inputs import DifferentiableInputs, Gradients, autograd_backward


@dataclass(frozen=True)
class Layout:
    """A layout of d_out.

    Attributes:
        of: returns a copy of a tensor (batch, heads, length, dim) in this layout, None if there is none.
        words: the layout as reasons name it.
        heads: numbers of key-value heads that no model and no other layout has. The first call with such a number finds
            no plan that was kept for another layout. The second number is for cases that have the first.
    """

    of: Callable[[torch.Tensor], torch.Tensor | None]
    words: str
    heads: tuple[int, int]


def _with_other_strides(d_out: torch.Tensor) -> torch.Tensor | None:
    """Return a copy in the other layout: adjacent heads of a token, or adjacent tokens of a head."""
    if 1 in d_out.shape[1:3]:
        return None
    lies_as_bhsd = d_out.stride(1) > d_out.stride(2)
    return d_out.transpose(1, 2).contiguous().transpose(1, 2) if lies_as_bhsd else d_out.contiguous()


def _with_gaps(d_out: torch.Tensor) -> torch.Tensor | None:
    """Return a copy whose neighbours along a row are not adjacent, as where a part of the channels is read on."""
    if d_out.shape[-1] == 1:
        return None
    wide = d_out.new_full((*d_out.shape[:-1], 2 * d_out.shape[-1]), torch.nan)
    return wide[..., ::2].copy_(d_out)


# cuDNN keeps plans whose key lacks the strides of d_out (torch 2.11): the second layout of a shape gets the first's.
OTHER = Layout(_with_other_strides, "lies in the other layout", (3, 5))
# Kernels that take contiguous rows for granted read every second number.
GAPS = Layout(_with_gaps, "has neighbours along a row that are not adjacent in memory", (7, 11))


def is_autograd(backward: Callable[..., Any]) -> bool:
    """Whether `Calls.backward` is PyTorch's, with nothing around it."""
    return isinstance(backward, partial) and backward.func is autograd_backward


def gradients_of(out: torch.Tensor, inputs: DifferentiableInputs, d_out: torch.Tensor) -> Gradients | None:
    """Return the gradients of the inputs' leaves by autograd, None where the output does not depend on all of them."""
    found = torch.autograd.grad(out, inputs.leaves, d_out, retain_graph=True, allow_unused=True)
    return None if any(one is None for one in found) else found
