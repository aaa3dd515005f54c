"""What a model does with an output and its gradient, and a benchmark does not."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attn_exp.attention.autograd import Gradients, autograd_backward
from attn_exp.attention.inputs import DifferentiableInputs


def is_autograd(backward: Callable[..., Any]) -> bool:
    """Whether `Calls.backward` is PyTorch's, with nothing around it."""
    return isinstance(backward, partial) and backward.func is autograd_backward


def with_other_strides(d_out: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a tensor (batch, heads, length, dim) that lies in the other layout, None if there is none.

    The gradient of an output lies as what follows the attention leaves it: adjacent heads of a token, or adjacent
    tokens of a head.
    """
    if 1 in d_out.shape[1:3]:
        return None
    lies_as_bhsd = d_out.stride(1) > d_out.stride(2)
    return d_out.transpose(1, 2).contiguous().transpose(1, 2) if lies_as_bhsd else d_out.contiguous()


def with_gaps(d_out: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a tensor whose neighbours along a row are not adjacent in memory, None for rows of one element.

    Between them is what is no number. The gradient of an output is such where what follows the attention reads a part
    of the channels, or splits them.
    """
    if d_out.shape[-1] == 1:
        return None
    wide = d_out.new_full((*d_out.shape[:-1], 2 * d_out.shape[-1]), torch.nan)
    return wide[..., ::2].copy_(d_out)


@dataclass(frozen=True)
class Layout:
    """A way in which the gradient of an output may lie.

    Attributes:
        of: returns a copy that lies so, None if there is none.
        words: what a reason has.
    """

    of: Callable[[torch.Tensor], torch.Tensor | None]
    words: str


OTHER = Layout(with_other_strides, "lies in the other layout")
GAPS = Layout(with_gaps, "has neighbours along a row that are not adjacent in memory")


def gradients_of(out: torch.Tensor, inputs: DifferentiableInputs, d_out: torch.Tensor) -> Gradients | None:
    """Return the gradients of the inputs' leaves by autograd, None where the output does not depend on all of them."""
    found = torch.autograd.grad(out, inputs.leaves, d_out, retain_graph=True, allow_unused=True)
    return None if any(one is None for one in found) else found


def change_in_place(out: torch.Tensor) -> None:
    """Negate an output, as an operator in place behind the attention does; PyTorch counts that."""
    torch.Tensor.detach(out).neg_()
