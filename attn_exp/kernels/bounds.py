"""Masks as data: the first and the last key that each query sees, and the queries that see each key."""

from dataclasses import dataclass

import torch

# The kernels read bounds of whole blocks; none has more rows.
_LARGEST_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Bounds:
    """A mask under which each query sees all keys between two, neither of which decreases from a query to the next.

    Attributes:
        keys: the first and the last key of each query, int32 (2, q_len rounded up); the last query's are repeated.
        queries: the first and the last query of each key, int32 (2, kv_len rounded up).
        pairs: how many pairs of a query and a key are visible; the autotuner distinguishes masks by it.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    pairs: int


def bounds_of(first: torch.Tensor, last: torch.Tensor, kv_len: int, pairs: int) -> Bounds:
    """Return the bounds of a mask, on its tensors' device and without waiting for it.

    Args:
        first: the first key that each query sees, (q_len,).
        last: the last one, before the first if it sees none.
        kv_len: how many keys there are.
        pairs: how many pairs are visible.
    """
    first, last = first.clamp(0, kv_len), last.clamp(-1, kv_len - 1)
    keys = torch.arange(kv_len, device=first.device)
    queries = torch.searchsorted(last, keys), torch.searchsorted(first, keys, right=True) - 1
    return Bounds(_rounded_up(first, last), _rounded_up(*queries), pairs)


def _rounded_up(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    both = torch.stack([first, last]).int()
    missing = -both.shape[1] % _LARGEST_BLOCK
    return torch.cat([both, both[:, -1:].expand(2, missing)], dim=1)
