"""A head with a sink, and a row of deeply negative scores in it.

The first key has 95 to 99.99 % of a query's weight and no value, nearly as in trained models (arXiv:2309.17453): the
output is then that of keys whose weights are small beside the largest one. Half of these keys are small. Each query has
another share, and those that are judged have all of them, from the least to the most, so that a bound below which
weights are left out shows whatever it is. So it does in the backward: dq of such a query is that of small weights.

In the same head all keys have one component in common, which other queries lack, and would move their scores all alike.
One query has nothing else: its scores are all equal and so negative that their exponentials vanish. As in models whose
keys have a bias, neither tensor looks unlike normal ones by its norm.
"""

import math
from dataclasses import replace

import torch

from attn_exp.attention.rare import OF_SHARP, OF_SINK, Rare
from attn_exp.attention.rare_draw import Draw
from attn_exp.attention.sampling import fresh_dice

# What is left of the weight beside the sink: least and most.
_LEFT = (1e-4, 0.05)
# In fp16 the others have weights of at least so much, which is a few steps of its smallest numbers.
_LEAST_WEIGHT_FP16 = 2.0**-18
# Keys beside a sink from which on a row has a norm, and one in so many of them is smaller by a factor.
_LEAST_OTHERS, _FAINT_KEYS, _FAINT_KEY = 8, 2, 2.0**-4
# The queries' largest number that meets the sink's: small, since there are many queries and one sink.
_OF_QUERIES = 2.0
# With fewer channels products are larger beside scores, and rounded by more.
_LEAST_DIM = 32
# The negative score at least.
_DEEP = 112.0


def sees_enough(draw: Draw) -> torch.Tensor:
    """Return the queries that see the first key and enough others that these have a value; none where none has.

    A learned sink leaves nothing of negative scores.
    """
    case = draw.case
    several = ((draw.first == 0) & (draw.last >= _LEAST_OTHERS)).nonzero().squeeze(1)
    fits = case.dtype != "float16" or case.kv_len * _LEAST_WEIGHT_FP16 <= _LEFT[1]
    usual = case.softcap is None and not case.sink and case.bias is None
    return several if fits and usual and case.head_dim >= _LEAST_DIM else several[:0]


def with_sink(draw: Draw, enough: torch.Tensor, count: int) -> Rare:
    """Return inputs with a sink in one head.

    Args:
        draw: draws the head, its keys and queries.
        enough: the queries that may be judged.
        count: how many are, besides the one whose scores are negative.
    """
    case, dice = draw.case, draw.dice
    batch, head, kv_head = draw.place()
    q, k, v = (one.detach().clone() for one in draw.normal.qkv)
    channel = dice.randrange(case.head_dim)
    # The sum of exp of N(0, 1) is e^0.5 times their number.
    least = max(_LEFT[0], _LEAST_WEIGHT_FP16 * case.kv_len) if case.dtype == "float16" else _LEFT[0]
    lowest, highest = (math.log((1 - left) / left * case.kv_len) + 0.5 for left in (_LEFT[1], least))
    deep, *others = draw.many(enough, 1 + count)
    # Sinks' scores, of the judged queries from the lowest to the highest. There are as many as tokens, for which `dice`
    # would take a tenth of a second.
    many = fresh_dice()
    scores = torch.rand(case.q_len, generator=many)
    scores[others] = (torch.arange(len(others)) + scores[others]) / len(others)
    scores = (lowest + scores * (highest - lowest)).to(q.device)
    faint = torch.randint(_FAINT_KEYS, (case.kv_len, 1), generator=many) == 0
    k[batch, kv_head] *= torch.where(faint, _FAINT_KEY, 1.0).to(k.device, k.dtype)
    k[batch, kv_head, 0] = 0.0
    common = torch.tensor([1.0 - 2.0 * dice.randrange(2) for _ in range(case.head_dim)], device=k.device)
    common[channel] = 0.0
    # The product of the query with every key is a power of two, and so is each of the query's numbers: in 16 bits the
    # products with rounded keys stay that power, the same for all of them.
    product = 2.0 ** math.ceil(math.log2(_DEEP * case.head_dim**0.5))
    number = 2.0 ** round(math.log2(product / (case.head_dim - 1)))
    keys = k[batch, kv_head].float()
    keys += ((product / number - keys @ common) / (case.head_dim - 1))[:, None] * common
    keys[:, channel] = 0.0
    keys[0, channel] = highest * case.head_dim**0.5 / _OF_QUERIES
    k[batch, kv_head] = keys.to(k.dtype)
    # Of other queries it would make scores larger, and their rounding.
    queries = q[batch, head].float()
    queries -= (queries @ common / (case.head_dim - 1))[:, None] * common
    queries[:, channel] = scores * (_OF_QUERIES / highest)
    if others:
        queries[deep] = common * -number
    q[batch, head] = queries.to(q.dtype)
    v[batch, kv_head, 0] = 0.0
    slack = torch.full((1 + len(others),), OF_SINK[case.dtype])
    slack[0] = OF_SHARP[case.dtype]
    inputs = replace(draw.normal, q_bhsd=q, k_bhsd=k, v_bhsd=v)
    rare = Rare(case, inputs, "sink", batch, head, torch.tensor([deep, *others]), slack, by_sink=channel)
    return draw.with_backward(rare)
