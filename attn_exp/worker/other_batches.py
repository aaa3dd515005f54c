"""Other batches of the same rows: at other positions, and in batches of other sizes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from random import Random

import torch

from attn_exp.attention.bits import bits_of
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case

# Orders of a batch that are compared at most; as many positions does every row have then.
_MOST_ORDERS = 7


@dataclass(frozen=True)
class OtherBatch:
    """Rows of a batch, or packed sequences of one row, in another batch.

    Attributes:
        case: the other batch's.
        dim: the dimension that is rearranged: 0, or 2 of packed sequences.
        places: for each index of `dim` the index that it has in the usual batch.
        parts: how many indices each row or sequence has, in the other batch's order.
        names: what each of them is: `row 2 at position 0`.
    """

    case: Case
    dim: int
    places: tuple[int, ...]
    parts: tuple[int, ...]
    names: tuple[str, ...]

    def picked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor of the usual batch in this one's order, as a new tensor."""
        index = torch.tensor(self.places, device=tensor.device)
        # PyTorch does not select rows of codes.
        return bits_of(tensor).index_select(self.dim, index).view(tensor.dtype)

    def inputs(self, usual: Inputs) -> Inputs:
        """Return this batch's inputs, with gradients where the usual ones have them."""
        q, k, v, d_out = (self.picked(tensor) for tensor in (*usual.qkv, usual.d_out_bhsd))
        for one, like in zip((q, k, v), usual.qkv, strict=True):
            one.requires_grad_(like.requires_grad)
        return replace(usual, q_bhsd=q, k_bhsd=k, v_bhsd=v, d_out_bhsd=d_out).laid_out(self.case.layout)

    def name(self, index: Sequence[int]) -> str:
        """Return which row or sequence an element of a result belongs to."""
        return self.names[bisect_right((*accumulate(self.parts),), index[self.dim])]


def other_positions(case: Case, dice: Random) -> list[OtherBatch]:
    """Return batches of the same rows or sequences at other positions; none if there is only one.

    Rows are rotated, so that each of them has as many positions; of packed sequences the order is turned round, and
    rotated once.
    """
    if case.lengths is None:
        shifts = sorted(dice.sample(range(1, case.batch), min(_MOST_ORDERS, case.batch - 1)))
        return [_rows(case, [(row + shift) % case.batch for row in range(case.batch)], "") for shift in shifts]
    usual = (*range(len(case.lengths)),)
    orders = dict.fromkeys(((*reversed(usual),), (*usual[1:], *usual[:1])))
    return [_sequences(case, case.lengths, order, "") for order in orders if order != usual]


def other_sizes(case: Case, dice: Random) -> list[OtherBatch]:
    """Return batches of other sizes, of rows or sequences at random: one, two, half of them, twice as many.

    Packed sequences: one of them alone, and two.
    """
    if case.lengths is None:
        sizes = sorted({1, 2, case.batch // 2, 2 * case.batch} - {0, case.batch})
        return [_rows(case, _drawn(case.batch, size, dice), f" in a batch of {size}") for size in sizes]
    count = len(case.lengths)
    return [
        _sequences(case, case.lengths, sorted(dice.sample(range(count), size)), told)
        for size, told in ((1, " alone"), (2, " with one other"))
        if size < count
    ]


def _drawn(count: int, size: int, dice: Random) -> list[int]:
    """Return rows at random, each once before any comes again."""
    rounds = -(-size // count)
    return [*chain.from_iterable(dice.sample(range(count), count) for _ in range(rounds))][:size]


def _rows(case: Case, rows: Sequence[int], told: str) -> OtherBatch:
    names = (f"row {row}{told or f' at position {at}'}" for at, row in enumerate(rows))
    return OtherBatch(replace(case, batch=len(rows)), 0, (*rows,), (1,) * len(rows), (*names,))


def _sequences(case: Case, lengths: Sequence[int], order: Sequence[int], told: str) -> OtherBatch:
    starts = (0, *accumulate(lengths))
    places = chain.from_iterable(range(starts[one], starts[one + 1]) for one in order)
    parts = tuple(lengths[one] for one in order)
    names = (f"sequence {one}{told or f' at position {at}'}" for at, one in enumerate(order))
    other = replace(case, lengths=parts, q_len=sum(parts), kv_len=sum(parts))
    return OtherBatch(other, 2, (*places,), parts, (*names,))
