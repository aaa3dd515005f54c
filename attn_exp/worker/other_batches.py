"""Other batches of the same rows: at other positions, in batches of other sizes, and parts of their queries."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from random import Random

import torch

from attn_exp.attention.contents import bits_of
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import Case

# Orders of a batch that are compared at most; as many positions does every row have then.
_MOST_ORDERS = 7
# Queries of a chunk: the least of the chunked prefills of servers.
_CHUNK = 512


@dataclass(frozen=True)
class Side:
    """Rearranged indices of queries or keys: each one's place in the usual batch, and how many each row has."""

    places: tuple[int, ...]
    parts: tuple[int, ...]


# The tensors that have an index for each key, and not for each query.
_OF_KEYS = frozenset({"k", "v", "dk", "dv"})


@dataclass(frozen=True)
class OtherBatch:
    """Rows of a batch, or packed sequences of one row, in another batch.

    Attributes:
        case: the other batch's.
        dim: the dimension that is rearranged: 0, or 2 of packed sequences.
        queries: its indices in tensors of queries and outputs.
        keys: its indices in tensors of keys and values.
        names: the name of each row or sequence: `row 2 at position 0`.
    """

    case: Case
    dim: int
    queries: Side
    keys: Side
    names: tuple[str, ...]

    def picked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor of the usual batch in this one's order, as a new tensor."""
        index = torch.tensor(self._side(name).places, device=tensor.device)
        # PyTorch does not select rows of codes.
        return bits_of(tensor).index_select(self.dim, index).view(tensor.dtype)

    def inputs(self, usual: Inputs) -> Inputs:
        """Return this batch's inputs, with gradients where the usual ones have them."""
        tensors = zip(("q", "k", "v", "d_out"), (*usual.qkv, usual.d_out_bhsd), strict=True)
        q, k, v, d_out = (self.picked(name, tensor) for name, tensor in tensors)
        for one, like in zip((q, k, v), usual.qkv, strict=True):
            one.requires_grad_(like.requires_grad)
        return replace(usual, q_bhsd=q, k_bhsd=k, v_bhsd=v, d_out_bhsd=d_out).laid_out(self.case.layout)

    def name(self, tensor: str, index: Sequence[int]) -> str:
        """Return which row or sequence an element of a tensor belongs to."""
        return self.names[bisect_right((*accumulate(self._side(tensor).parts),), index[self.dim])]

    def _side(self, name: str) -> Side:
        return self.keys if name in _OF_KEYS else self.queries


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
    return [_sequences(case, order, "") for order in orders if order != usual]


def other_sizes(case: Case, dice: Random) -> list[OtherBatch]:
    """Return batches of other sizes, of rows or sequences at random: one, two, half of them, twice as many.

    Packed sequences: one of them alone, and two. They share no pages: how many these have depends on the others.
    """
    case = replace(case, pages="shuffled" if case.pages == "shared" else case.pages)
    if case.lengths is None:
        sizes = sorted({1, 2, case.batch // 2, 2 * case.batch} - {0, case.batch})
        return [_rows(case, _drawn(case.batch, size, dice), f" in a batch of {size}") for size in sizes]
    filled = [one for one, queries in enumerate(case.lengths) if queries]
    return [
        _sequences(case, sorted(dice.sample(filled, size)), told)
        for size, told in ((1, " alone"), (2, " with one other"))
        if size <= len(filled) and size < len(case.lengths)
    ]


def other_phases(case: Case) -> list[OtherBatch]:
    """Return the last query alone, as in decoding, and the last chunk of queries, as in a chunked prefill."""
    if case.lengths is not None or (case.causal and not case.square and case.align != "bottom_right"):
        return []
    keys = Side((*range(case.kv_len),), (case.kv_len,))
    phases = []
    for count in sorted({1, min(_CHUNK, case.q_len // 2)} - {0, case.q_len}):
        queries = Side((*range(case.q_len - count, case.q_len),), (count,))
        names = ("the last query alone" if count == 1 else f"the last {count} queries alone",)
        phases.append(OtherBatch(replace(case, q_len=count, align="bottom_right"), 2, queries, keys, names))
    return phases


def _drawn(count: int, size: int, dice: Random) -> list[int]:
    """Return rows at random, each once before any comes again."""
    rounds = -(-size // count)
    return [*chain.from_iterable(dice.sample(range(count), count) for _ in range(rounds))][:size]


def _rows(case: Case, rows: Sequence[int], told: str) -> OtherBatch:
    names = (f"row {row}{told or f' at position {at}'}" for at, row in enumerate(rows))
    side = Side((*rows,), (1,) * len(rows))
    return OtherBatch(replace(case, batch=len(rows)), 0, side, side, (*names,))


def _sequences(case: Case, order: Sequence[int], told: str) -> OtherBatch:
    assert case.lengths is not None
    queries, keys = _moved(case.lengths, order), _moved(case.kv_lengths or case.lengths, order)
    names = (f"sequence {one}{told or f' at position {at}'}" for at, one in enumerate(order))
    other = replace(
        case,
        lengths=queries.parts,
        kv_lengths=None if case.kv_lengths is None else keys.parts,
        q_len=sum(queries.parts),
        kv_len=sum(keys.parts),
    )
    return OtherBatch(other, 2, queries, keys, (*names,))


def _moved(lengths: Sequence[int], order: Sequence[int]) -> Side:
    starts = (0, *accumulate(lengths))
    places = chain.from_iterable(range(starts[one], starts[one + 1]) for one in order)
    return Side((*places,), tuple(lengths[one] for one in order))
