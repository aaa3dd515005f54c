"""Links: timed calls whose result is that of the call before but for signs, so that every row of both is compared.

Changing the signs of the same channels of q and k changes no score, and changing those of v changes those of the
output. A row of dq is linear in its row of d_out, and a channel of dv in its channel of d_out. So where only these
change, each row of a result is known from the call before, without a reference. Rows are compared by their products
with a random vector of signs, which costs as much as reading the result.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attn_exp.attention.error_parts import Tolerance
from attn_exp.attention.sampling import fresh_dice

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Rows:
    """The rows of one call's tensor.

    Attributes:
        products: of each row with a vector, as if no sign were changed, (batch, heads, length) in float32.
        norms: of each row, in the same shape.
    """

    products: torch.Tensor
    norms: torch.Tensor


@dataclass(frozen=True)
class Link:
    """What a call's tensor is off from that of the call before.

    Attributes:
        name: of the tensor.
        index: of the call, from 1 on; 0 of one before the timing.
        off: the largest difference of a row relative to its norm, a tensor of one number that nothing waited for.
    """

    name: str
    index: int
    off: torch.Tensor


class Linking:
    """Takes the rows of calls and compares those that are linked.

    Args:
        dims: the last dimension of each tensor, by name.
        device: where they are.
    """

    def __init__(self, dims: Mapping[str, int], device: torch.device) -> None:
        dice = fresh_dice()
        self._vectors = {
            name: (torch.randint(2, (dim,), generator=dice) * 2.0 - 1).to(device) for name, dim in dims.items()
        }

    @torch.no_grad()
    def taken(self, name: str, tensor: torch.Tensor, *, channels: torch.Tensor, rows: torch.Tensor | None) -> Rows:
        """Return the rows of a tensor.

        Args:
            name: of the tensor.
            tensor: (batch, heads, length, dim).
            channels: the signs of its channels, (dim,).
            rows: the signs of its rows, (length,), or None.
        """
        numbers = torch.Tensor.detach(tensor).float()
        # No matrix product: a backend may have left autocast on.
        products = (numbers * (self._vectors[name] * channels)).sum(-1)
        return Rows(products if rows is None else products * rows, numbers.norm(dim=-1))

    @torch.no_grad()
    def link(self, name: str, index: int, before: Rows, now: Rows, small: float) -> Link:
        """Return what a tensor is off from that of the call before, `small` being that of its `Tolerance`."""
        norm = torch.maximum(before.norms, now.norms)
        least = (small * norm.square().mean().sqrt()).clamp(min=_TINY)
        return Link(name, index, ((now.products - before.products).abs() / norm.maximum(least)).amax())


def wrong_link(links: list[Link], tolerances: Mapping[str, Tolerance]) -> tuple[int, str] | None:
    """Return the index of a call that is unlike the one before it and what is wrong as a sentence, or None.

    Both may be off by what a row may be. The product of an error with random signs is as large as the error, and rarely
    several times as large; honest calls on the same numbers make the same errors.
    """
    if not links:
        return None
    found = torch.stack([link.off for link in links]).nan_to_num(math.inf, math.inf).tolist()
    for link, off in zip(links, found, strict=True):
        bounds = tolerances[link.name]
        allowed = 2 * (bounds.own_row if bounds.own_row is not None else bounds.worst_row)
        if off > allowed:
            return link.index, (
                f"a row of {link.name} is off by {off:.2g} of its norm from that of the call before it, whose inputs "
                f"are the same but for signs, allowed is {allowed:.2g}"
            )
    return None
