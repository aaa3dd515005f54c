"""A head with a sink, and a row of deeply negative scores in it.

The first key has 95 to 99.9 % of every query's weight and no value, nearly as in trained models (arXiv:2309.17453): the
output is then that of keys whose weights are small beside the largest one. Half of these keys are small.

In the same head all keys have one component in common, which other queries lack, and would move their scores all alike.
One query has nothing else: its scores are all equal and so negative that their exponentials vanish. As in models whose
keys have a bias, neither tensor looks unlike normal ones by its norm.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from random import SystemRandom

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.attention.rare import Rare
from attn_exp.core.case import Case

# The sink's share of the weight.
_SHARES = (0.95, 0.999)
# In fp16 the others have weights of at least so much, which is a few steps of its smallest numbers.
_LEAST_WEIGHT_FP16 = 2.0**-18
# Keys beside a sink from which on a row has a norm, and one in so many of them is smaller by a factor.
_LEAST_OTHERS, _FAINT_KEYS, _FAINT_KEY = 8, 2, 2.0**-4
# The queries' number that meets the sink's: small, since there are many queries and one sink.
_OF_QUERIES = 2.0
# With fewer channels products are larger beside scores, and rounded by more.
_LEAST_DIM = 32
# The negative score at least.
_DEEP = 112.0


def sees_enough(case: Case, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the queries that see the first key and enough others that these have a value; none where none has.

    Args:
        case: the problem.
        first: the first key that each query sees.
        last: the last one.
    """
    several = ((first == 0) & (last >= _LEAST_OTHERS)).nonzero().squeeze(1)
    fits = case.dtype != "float16" or case.kv_len * _LEAST_WEIGHT_FP16 <= 1 - _SHARES[0]
    return several if fits and case.softcap is None and case.head_dim >= _LEAST_DIM else several[:0]


def with_sink(case: Case, normal: Inputs, dice: SystemRandom, drawn: Callable[[], int], count: int) -> Rare:
    """Return inputs with a sink in one head.

    Args:
        case: the problem.
        normal: its inputs, which stay as they are.
        dice: draws the head and its keys.
        drawn: draws a query that is judged.
        count: how many are, besides the one whose scores are negative.
    """
    batch, head = dice.randrange(case.batch), dice.randrange(case.q_heads)
    kv_head = head // (case.q_heads // case.kv_heads)
    others = math.exp(dice.uniform(math.log(1 - _SHARES[1]), math.log(1 - _SHARES[0])))
    if case.dtype == "float16":
        others = min(1 - _SHARES[0], max(others, _LEAST_WEIGHT_FP16 * case.kv_len))
    # The sum of exp of N(0, 1) is e^0.5 times their number.
    score = math.log((1 - others) / others * case.kv_len) + 0.5
    q, k, v = (one.detach().clone() for one in normal.qkv)
    channel = dice.randrange(case.head_dim)
    size = score * case.head_dim**0.5 / _OF_QUERIES
    faint = [index for index in range(1, case.kv_len) if dice.randrange(_FAINT_KEYS) == 0]
    k[batch, kv_head, faint] *= _FAINT_KEY
    k[batch, kv_head, 0] = 0.0
    common = torch.tensor([1.0 - 2.0 * dice.randrange(2) for _ in range(case.head_dim)], device=k.device)
    common[channel] = 0.0
    # The product of the query with every key is a power of two, and so is each of the query's numbers: whoever rounds
    # products rounds all of them to that one.
    product = 2.0 ** math.ceil(math.log2(_DEEP * case.head_dim**0.5))
    number = 2.0 ** round(math.log2(product / (case.head_dim - 1)))
    keys = k[batch, kv_head].float()
    keys += ((product / number - keys @ common) / (case.head_dim - 1))[:, None] * common
    keys[:, channel] = 0.0
    keys[0, channel] = size
    k[batch, kv_head] = keys.to(k.dtype)
    # Of other queries it would make scores larger, and their rounding.
    queries = q[batch, head].float()
    q[batch, head] = (queries - (queries @ common / (case.head_dim - 1))[:, None] * common).to(q.dtype)
    q[batch, head, :, channel] = _OF_QUERIES
    deep = drawn()
    q[batch, head, deep] = (common * -number).to(q.dtype)
    v[batch, kv_head, 0] = 0.0
    judged = torch.tensor([deep, *(drawn() for _ in range(count))])
    return Rare(case, replace(normal, q_bhsd=q, k_bhsd=k, v_bhsd=v), "sink", batch, head, judged)
