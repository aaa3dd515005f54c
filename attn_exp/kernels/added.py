"""What is added to scores, as data: ALiBi, by the slopes of heads and the key that distances count from, and a bias."""

import math
from dataclasses import dataclass

import torch

LOG2_E = math.log2(math.e)
# The kernels read rows of whole blocks; none has more.
_LARGEST_BLOCK = 128


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
    """Return what is added to scores.

    Args:
        slopes: of ALiBi, (q_heads,), or None.
        own_keys: the key from which the distances of each query count, (q_len,); None without slopes.
        bias: as that of `Added`.
    """
    if slopes is None or own_keys is None:
        return Added(bias=bias)
    missing = -len(own_keys) % _LARGEST_BLOCK
    rounded_up = torch.cat([own_keys, own_keys[-1:].expand(missing)])
    return Added(slopes.float() * LOG2_E, rounded_up.int(), bias)
