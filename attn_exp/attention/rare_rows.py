"""One hard row among normal ones, at a place that is drawn anew.

A kernel that looks at a sample of its rows, and leaves out what only hard ones need where these look normal, is right
on inputs that are all normal and on inputs that are hard everywhere. Here a single row of q, or of k, makes one score
so large that its exponential overflows. Beside the row of q there is a key of zeros, as those of padding are, whose
value is large: a key like others, that no mask hides.
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
# Rows of the head that are judged with the hard one.
_OTHERS = 32
# The value of the key of zeros, over the square root of the number of keys: a quarter of a row's norm and more.
_VALUE = 1.5
# What rows of scores with a standard deviation of 16 to 28 may be off by besides: who rounds scores changes weights by
# that, or in float32 who sums them in another order.
_OF_SHARP = {"bfloat16": 0.5, "float16": 0.1, "float32": 1e-4}


@dataclass(frozen=True)
class Rare:
    """Inputs with a hard row.

    Attributes:
        case: the problem.
        inputs: the inputs.
        hard: the tensor whose row it is.
        batch: the row of the batch.
        head: the query head.
        queries: those that are judged, the first with the large score.
    """

    case: Case
    inputs: Inputs
    hard: Literal["q", "k"]
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
            allowed = own_row + (_OF_SHARP[self.case.dtype] if self.hard == "k" and index else 0.0)
            if found <= allowed:
                continue
            of = f"row {int(self.queries[index])} of out in head {self.head} of batch row {self.batch}"
            among = f"with one large row of {self.hard} among normal ones"
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
    """Yield inputs with a hard row of q, and others with one of k; none where normal scores never reach that far.

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

    def drawn() -> int:
        return int(sees[dice.randrange(len(sees))])

    for hard in ("q", "k"):
        batch, head, query = dice.randrange(case.batch), dice.randrange(case.q_heads), drawn()
        kv_head = head // (case.q_heads // case.kv_heads)
        key = dice.randint(int(first[query]), int(last[query]))
        q, k, v = (one.detach() for one in normal.qkv)
        q_row, k_row = q[batch, head, query].float(), k[batch, kv_head, key].float()
        if hard == "q":
            q, k, v = q.clone(), k.clone(), v.clone()
            q[batch, head, query] = k_row * (_SCORE * case.head_dim**0.5 / k_row.square().sum())
            zeros = dice.randrange(case.kv_len)
            if zeros != key:
                k[batch, kv_head, zeros] = 0.0
                v[batch, kv_head, zeros] *= 2.0 ** round(math.log2(_VALUE * case.kv_len**0.5))
        else:
            k = k.clone()
            k[batch, kv_head, key] = q_row * (_SCORE * case.head_dim**0.5 / q_row.square().sum())
        queries = torch.tensor([query, *(drawn() for _ in range(_OTHERS))])
        inputs = replace(normal, q_bhsd=q, k_bhsd=k, v_bhsd=v)
        yield Rare(case, inputs, "q" if hard == "q" else "k", batch, head, queries)
