"""One hard row among normal ones, at a place that is drawn anew, or one head with a sink.

A kernel that looks at a sample of its rows, and leaves out what only hard ones need where these look normal, is right
on inputs that are all normal and on inputs that are hard everywhere. Here a single row of q, or of k, makes one score
so large that its exponential overflows. Beside the row of q there is a key of zeros, as those of padding are, whose
value is large: a key like others, that no mask hides; and other queries of its head are faint. The hard row of q and
that of k are in different halves of their tensors, so that who looks at only the first tiles finds both normal at most
once.

In the head with a sink its first key has 95 to 99.9 % of every query's weight and no value, nearly as in trained models
(arXiv:2309.17453): the output is then that of keys whose weights are small beside the largest one. Half of these
keys are small.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import SystemRandom
from typing import Literal

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import NORMAL, Case
from attn_exp.core.text import apart

# exp overflows beyond 88.7. Other keys of the row then score 80 to 110 at most.
_SCORE = 160.0
# With fewer channels other keys come near to it.
_LEAST_DIM = 32
# The powers of two by which other queries of the head of a hard one are smaller, and by which half of the keys
# beside a sink are.
_OCTAVES, _FAINT_KEYS, _FAINT_KEY = 6, 2, 2.0**-4
# Rows of the head that are judged with the hard one, and the keys beside a sink from which on a row has a norm.
_OTHERS, _LEAST_OTHERS = 32, 8
# The value of the key of zeros, over the square root of the number of keys: a quarter of a row's norm and more.
_VALUE = 1.5
# What rows of scores with a standard deviation of 16 to 28 may be off by besides: who rounds scores changes weights by
# that, or in float32 who sums them in another order.
_OF_SHARP = {"bfloat16": 0.5, "float16": 0.1, "float32": 1e-4}
# The sink's share of the weight, and what rounding its score may change the others' weights by.
_SHARES, _OF_SINK = (0.95, 0.999), {"bfloat16": 0.15, "float16": 0.06, "float32": 1e-4}
# In fp16 the others have weights of at least so much, which is a few steps of its smallest numbers.
_LEAST_WEIGHT_FP16 = 2.0**-18


@dataclass(frozen=True)
class Rare:
    """Inputs with a hard row.

    Attributes:
        case: the problem.
        inputs: the inputs.
        hard: the tensor whose row it is, or `sink`.
        batch: the row of the batch.
        head: the query head.
        queries: those that are judged, the first with the large score.
    """

    case: Case
    inputs: Inputs
    hard: Literal["q", "k", "sink"]
    batch: int
    head: int
    queries: torch.Tensor

    @torch.no_grad()
    def wrong(self, out: torch.Tensor, own_row: float) -> str | None:
        """Return which row of a call's output is wrong as a sentence, or None.

        Args:
            out: the output.
            own_row: what a row of normal inputs may be off by, by its own norm.
        """
        right, rows = self._reference(), out[self.batch, self.head, self.queries.to(out.device)].float()
        error = ((rows - right).norm(dim=-1) / right.norm(dim=-1)).tolist()
        for index, found in enumerate(error):
            # The hard row of k makes the scores of all others sharp; the row with the large one is v at its key.
            rounded = _OF_SHARP if self.hard == "k" and index else _OF_SINK if self.hard == "sink" else {}
            allowed = own_row + rounded.get(self.case.dtype, 0.0)
            if found <= allowed:
                continue
            of = f"row {int(self.queries[index])} of out in head {self.head} of batch row {self.batch}"
            among = f"with one large row of {self.hard} among normal ones"
            if self.hard == "sink":
                among = "with a first key that has nearly all of the weight and no value"
            if not math.isfinite(found):
                return f"{among}, {of} has values that are not finite"
            off, most = apart(found, allowed)
            return f"{among}, {of} is off by {off} of its norm, allowed is {most}"
        return None

    def _reference(self) -> torch.Tensor:
        case, inputs = self.case, self.inputs
        kv_head = self.head // (case.q_heads // case.kv_heads)
        q = inputs.q_bhsd[self.batch, self.head, self.queries.to(inputs.q_bhsd.device)].float()
        k, v = (one[self.batch, kv_head].float() for one in (inputs.k_bhsd, inputs.v_bhsd))
        first, last = (bound.to(q.device) for bound in seen_keys(case, self.queries))
        key = torch.arange(case.kv_len, device=q.device)
        hidden = (key > last[:, None]) | (key < first[:, None])
        scores = (q @ k.mT * case.head_dim**-0.5).masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, dim=-1) @ v


@torch.no_grad()
def rare_inputs(case: Case, normal: Inputs) -> Iterator[Rare]:
    """Yield inputs with a hard row of q, of k, and with a sink; none where normal scores never reach that far.

    That is at fp8, with a softcap, and with few channels.

    Args:
        case: the problem.
        normal: its inputs, which stay as they are.
    """
    if case.quantised or case.softcap is not None or case.head_dim < _LEAST_DIM or normal.kind != NORMAL:
        return
    dice, first, last = SystemRandom(), *seen_keys(case, torch.arange(case.q_len))
    sees = (last >= first).nonzero().squeeze(1)
    if not len(sees):
        return

    def drawn(some: torch.Tensor) -> int:
        return int(some[dice.randrange(len(some))])

    # Which half of the queries, or of the keys, a hard row is in.
    late = dice.random() < 1 / 2
    hard_rows: tuple[Literal["q", "k"], ...] = ("q", "k")
    for hard in hard_rows:
        batch, head = dice.randrange(case.batch), dice.randrange(case.q_heads)
        kv_head = head // (case.q_heads // case.kv_heads)
        of_half = sees[(sees >= case.q_len // 2) == late] if hard == "q" else sees[last[sees] >= case.kv_len // 2]
        query = drawn(of_half if len(of_half) else sees)
        lowest, highest = int(first[query]), int(last[query])
        if hard == "k" and late:
            highest = max(lowest, min(highest, case.kv_len // 2 - 1))
        elif hard == "k":
            lowest = min(highest, max(lowest, case.kv_len // 2))
        key = dice.randint(lowest, highest)
        q, k, v = (one.detach() for one in normal.qkv)
        q_row, k_row = q[batch, head, query].float(), k[batch, kv_head, key].float()
        if hard == "q":
            q, k, v = q.clone(), k.clone(), v.clone()
            q[batch, head, query] = k_row * (_SCORE * case.head_dim**0.5 / k_row.square().sum())
            # Faint queries, whose weights are nearly equal but not quite.
            others = [one for one in (drawn(sees) for _ in range(_OTHERS)) if one != query]
            octaves = torch.tensor([dice.randrange(_OCTAVES) for _ in others], device=q.device)
            q[batch, head, others] *= torch.exp2(-octaves.float()).to(q.dtype).unsqueeze(-1)
            zeros = dice.randrange(case.kv_len)
            if zeros != key:
                k[batch, kv_head, zeros] = 0.0
                v[batch, kv_head, zeros] *= 2.0 ** round(math.log2(_VALUE * case.kv_len**0.5))
        else:
            k = k.clone()
            k[batch, kv_head, key] = q_row * (_SCORE * case.head_dim**0.5 / q_row.square().sum())
            others = [drawn(sees) for _ in range(_OTHERS)]
        queries = torch.tensor([query, *others])
        inputs = replace(normal, q_bhsd=q, k_bhsd=k, v_bhsd=v)
        yield Rare(case, inputs, hard, batch, head, queries)
    # Queries that see the first key, and enough others that these have a value.
    several = ((first == 0) & (last >= _LEAST_OTHERS)).nonzero().squeeze(1)
    if len(several) and (case.dtype != "float16" or case.kv_len * _LEAST_WEIGHT_FP16 <= 1 - _SHARES[0]):
        yield _with_sink(case, normal, dice, torch.tensor([drawn(several) for _ in range(_OTHERS + 1)]))


def _with_sink(case: Case, normal: Inputs, dice: SystemRandom, queries: torch.Tensor) -> Rare:
    """Return inputs with a sink in one head."""
    batch, head = dice.randrange(case.batch), dice.randrange(case.q_heads)
    kv_head = head // (case.q_heads // case.kv_heads)
    others = math.exp(dice.uniform(math.log(1 - _SHARES[1]), math.log(1 - _SHARES[0])))
    if case.dtype == "float16":
        others = min(1 - _SHARES[0], max(others, _LEAST_WEIGHT_FP16 * case.kv_len))
    # The sum of exp of N(0, 1) is e^0.5 times their number.
    score = math.log((1 - others) / others * case.kv_len) + 0.5
    q, k, v = (one.detach().clone() for one in normal.qkv)
    channel = dice.randrange(case.head_dim)
    size = math.sqrt(score * case.head_dim**0.5)
    faint = [index for index in range(1, case.kv_len) if dice.randrange(_FAINT_KEYS) == 0]
    k[batch, kv_head, faint] *= _FAINT_KEY
    q[batch, head, :, channel], k[batch, kv_head, :, channel] = size, 0.0
    k[batch, kv_head, 0] = 0.0
    k[batch, kv_head, 0, channel] = size
    v[batch, kv_head, 0] = 0.0
    return Rare(case, replace(normal, q_bhsd=q, k_bhsd=k, v_bhsd=v), "sink", batch, head, queries)
