"""What kernels get beside q, k and v as data: the bounds of a mask, and terms that are added to scores."""

import math
from dataclasses import dataclass

import torch

# The kernels read rows of whole blocks; none has more.
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

    `first` and `last` are the keys between which each query sees, (q_len,); the last is before the first if there are
    none.
    """
    first, last = first.clamp(0, kv_len), last.clamp(-1, kv_len - 1)
    keys = torch.arange(kv_len, device=first.device)
    queries = torch.searchsorted(last, keys), torch.searchsorted(first, keys, right=True) - 1
    return Bounds(_rounded_up(first, last), _rounded_up(*queries), pairs)


def _rounded_up(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    both = torch.stack([first, last]).int()
    missing = -both.shape[1] % _LARGEST_BLOCK
    return torch.cat([both, both[:, -1:].expand(2, missing)], dim=1)


LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class Added:
    """Numbers that are added to scores after the softcap.

    Attributes:
        slopes_log2: float32 (q_heads,): the base-2 score of query i and key j loses the slope of its head times
            |own_keys[i] - j|. None for none.
        own_keys: int32 (q_len rounded up), None without slopes.
        bias: (1, q_heads or 1, q_len, kv_len) with a last stride of 1, in units of scores. None for none.
    """

    slopes_log2: torch.Tensor | None = None
    own_keys: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def added_of(slopes: torch.Tensor | None, own_keys: torch.Tensor | None, bias: torch.Tensor | None) -> Added:
    """Return the terms added to scores; ALiBi's distances of a query count from its own key."""
    if slopes is None or own_keys is None:
        return Added(bias=bias)
    missing = -len(own_keys) % _LARGEST_BLOCK
    rounded_up = torch.cat([own_keys, own_keys[-1:].expand(missing)])
    return Added(slopes.float() * LOG2_E, rounded_up.int(), bias)
