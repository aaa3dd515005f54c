"""Terms added to capped scores before the mask: ALiBi, and a tensor of biases.

ALiBi (arXiv:2108.12409, section 3) subtracts from a score the distance of its query and key times a slope of the query
head. The distance counts from the query's own key, the last one under a causal mask. Without a mask it counts in both
directions, as in FlashAttention. A tensor of biases has a number for each query and key. It may differ between heads,
and is the same in all rows of the batch, as in T5 (arXiv:1910.10683, 2.1).
"""

import math

import torch

from attn_exp.attention.formula import own_keys
from attn_exp.core.case.case import Case

# The numbers of a bias are multiples of 1/32 from -2 to below 2: each is exact in 16 bits.
_STEPS, _STEP = 128, 1 / 32
# Odd numbers that mix the bits of a query, a key and a head (xxHash's primes, and multipliers of MurmurHash3's fmix32).
OF_QUERY, OF_KEY, OF_HEAD = 2654435761, 2246822519, 3266489917
# By how many bits to the right they are mixed with themselves, and multiplied by which number then.
MIXES, LAST_SHIFT = ((16, 2246822507), (13, 3266489909)), 16
_INT32 = 1 << 32


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head.

    A power of two n of heads has 2^(-8/n), 2^(-16/n) and so on, down to 2^-8. Other numbers have the slopes of the
    power of two below, then every second one of twice that power. This is `get_slopes` in fairseq/models/transformer.py
    of the paper's code (https://github.com/ofirpress/attention_with_linear_biases).
    """
    power = 1 << int(math.log2(heads))
    slopes = _geometric(power)
    return slopes if power == heads else slopes + _geometric(2 * power)[::2][: heads - power]


def biased(case: Case) -> bool:
    """Whether anything is added to scores."""
    return case.alibi or case.bias is not None


def added_scores(
    case: Case, heads: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    """Return the terms added to the scores of query heads, counted over the batch, or None if there are none.

    `rows` are the queries, (n,), or (..., n) of each head, and `keys` the keys, (m,).

    Returns:
        (..., n, m), with the shape of `heads` before; a view of one head if all have the same numbers.
    """
    if not biased(case):
        return None
    shape = (*torch.broadcast_shapes(heads.shape, rows.shape[:-1]), rows.shape[-1], len(keys))
    heads = (heads % case.q_heads)[..., None, None]
    total: torch.Tensor | None = None
    if case.alibi:
        distance = (own_keys(case, rows)[..., None] - keys).abs_().to(dtype)
        slopes = torch.tensor(alibi_slopes(case.q_heads), device=heads.device)
        total = distance * -slopes.to(dtype)[heads]
    if case.bias is not None:
        own = heads if case.bias == "heads" else heads.new_zeros(())
        numbers = _numbers(rows[..., None], keys, own).to(dtype).mul_(_STEP)
        total = numbers if total is None else total + numbers
    assert total is not None
    return total.expand(shape)


def bias_tensor(case: Case, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what is added to all scores, (1, q_heads or 1, q_len, kv_len); None if nothing is."""
    heads = 1 if case.bias == "shared" and not case.alibi else case.q_heads
    of_heads, rows, keys = (torch.arange(count, device=device) for count in (heads, case.q_len, case.kv_len))
    added = added_scores(case, of_heads, rows, keys)
    return None if added is None else added.to(dtype).unsqueeze(0)


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8 * index / heads) for index in range(1, heads + 1)]


def _numbers(rows: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return whole numbers from -64 to 63 that look random, of indices that broadcast; the same on every device."""
    mixed = _times(rows, OF_QUERY) + _times(heads, OF_HEAD) + _times(keys, OF_KEY)
    for by, factor in MIXES:
        mixed ^= _shifted(mixed, by)
        mixed *= _signed(factor)
    mixed ^= _shifted(mixed, LAST_SHIFT)
    return (mixed & (_STEPS - 1)) - _STEPS // 2


def _times(indices: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the low 32 bits of products as int32."""
    return ((indices.long() * factor + _INT32 // 2) % _INT32 - _INT32 // 2).int()


def _signed(bits: int) -> int:
    """Return what int32 takes these 32 bits for."""
    return (bits + _INT32 // 2) % _INT32 - _INT32 // 2


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift 32 bits to the right as those of an unsigned number."""
    return (bits >> by) & ((1 << (32 - by)) - 1)
