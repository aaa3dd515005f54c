"""What scores have beside the products: ALiBi, a tensor of biases, and sinks.

ALiBi (arXiv:2108.12409, section 3) subtracts from a capped score the distance of its query and key times a slope of the
query head. The distance counts from the query's own key, the last one under a causal mask. Without a mask it counts in
both directions, as in FlashAttention. A tensor of biases has a number for each query and key. It may differ between
heads, and is the same in all rows of the batch, as in T5 (arXiv:1910.10683, 2.1).

A sink is a learned logit of a query head that joins the softmax's denominator and has no value. The weights of a query
are exp(s - lse) with lse = log(sum(exp(s)) + exp(sink)): they sum to less than one. The gradient of a score is
p (dp - sum(p dp)), as without a sink. The gradient of the sink is that of a key without a value, the sum of
-exp(sink - lse) sum(p dp) over the queries of its head.
"""

import math

import torch

from attn_exp.attention.formula import own_keys
from attn_exp.core.case.case import Case

# The numbers of a bias are multiples of 1/32 from -2 to below 2: each is exact in 16 bits.
_STEPS, _STEP_OF_BIAS = 128, 1 / 32
# Odd numbers that mix the bits of a query, a key and a head (xxHash's primes, and multipliers of MurmurHash3's fmix32).
OF_QUERY, OF_KEY, OF_HEAD = 2654435761, 2246822519, 3266489917
# By how many bits to the right they are mixed with themselves, and multiplied by which number then.
MIXES, LAST_SHIFT = ((16, 2246822507), (13, 3266489909)), 16
_INT32 = 1 << 32
# With normal scores the sink takes 5 to 50 % of a query that sees all keys, another share in each head.
_LEAST, _SPREAD = -2.5, 3.0
# Multiples of it are spread evenly (the golden ratio).
_GOLDEN = (5**0.5 - 1) / 2


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
        numbers = _numbers(rows[..., None], keys, own).to(dtype).mul_(_STEP_OF_BIAS)
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
        mixed *= (factor + _INT32 // 2) % _INT32 - _INT32 // 2
    mixed ^= _shifted(mixed, LAST_SHIFT)
    return (mixed & (_STEPS - 1)) - _STEPS // 2


def _times(indices: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the low 32 bits of products as int32."""
    return ((indices.long() * factor + _INT32 // 2) % _INT32 - _INT32 // 2).int()


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift 32 bits to the right as those of an unsigned number."""
    return (bits >> by) & ((1 << (32 - by)) - 1)


def sinks_of(case: Case, device: torch.device) -> torch.Tensor | None:
    """Return the sinks of a case's query heads, (1, q_heads, 1, 1) in its dtype; None if it has none."""
    if not case.sink:
        return None
    several = torch.arange(1, case.q_heads + 1, dtype=torch.float64) * _GOLDEN % 1
    logits = math.log(case.most_keys) + _LEAST + _SPREAD * several
    return logits.to(getattr(torch, case.dtype)).to(device).reshape(1, -1, 1, 1)


def sinks_at(case: Case, heads: torch.Tensor) -> torch.Tensor | None:
    """Return the sinks of query heads that are counted over the batch, in float64 and the shape of `heads`."""
    sinks = sinks_of(case, heads.device)
    return None if sinks is None else sinks.double().flatten()[heads % case.q_heads]


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of keys, whose last dimension is that of the masked `scores`.

    `sinks` of rows broadcast to (..., 1). With them, a row of minus infinities gets zeros.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.exp(scores - log_sum(scores, sinks))


def log_sum(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the logarithm of each row's sum of exponentials, (..., 1); the arguments are those of `softmax`."""
    of_keys = torch.logsumexp(scores, dim=-1, keepdim=True)
    return of_keys if sinks is None else torch.logaddexp(of_keys, sinks.to(scores.dtype))
