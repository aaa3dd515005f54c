"""One hard row among normal ones, at a place that is drawn anew, or one head with a sink.

A kernel that looks at a sample of its rows, or at a mean of all, and leaves out what only hard ones need where these
look normal, is right on inputs that are all normal and on inputs that are hard everywhere. Here a single row of q, or
of k, makes one score so large that its exponential overflows. The hard row of q and that of k are in different halves
of their tensors, so that who looks at only the first tiles finds both normal at most once.

Beside the row of q a second key's score is too large for an exponential, and still far below the first one's: who
clamps scores takes them for equal, and who leaves out a softcap for different. The value of the first key is tiny, as
nothing is in fp16. There is a key of zeros, as those of padding are, whose value is large, and the last keys are zeros
in all heads, as the unused end of a cache is: keys like others, that no mask hides. Other queries of the head are
faint, and one is zeros in all heads. The same query is judged in another row of the batch and in another head, too.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from random import SystemRandom
from typing import Literal

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.rare import Rare
from attn_exp.attention.rare_sinks import sees_enough, with_sink
from attn_exp.core.case import NORMAL, Case

# exp overflows beyond 88.7. Other keys of the row then score 80 to 110 at most, with fewer than 32 channels 130: of so
# many keys that is the one whose row has the widest gap. A softcap is passed by as much.
_SCORE, _SECOND, _OVER_SOFTCAP, _CANDIDATES, _GAP = 160.0, 0.8125, 3.2, 6, 30.0
# With fewer channels other keys come nearer.
_LEAST_DIM = 16
# The power of two by which the hard key's value is smaller: fp16's numbers end at 2^-24.
_TINY = {"bfloat16": -22, "float32": -22}
# The powers of two by which other queries of the head of a hard one are smaller.
_OCTAVES = 6
# Rows of the head that are judged with the hard one.
_OTHERS = 32
# The value of the key of zeros, over the square root of the number of keys: a quarter of a row's norm and more.
_VALUE = 1.5
# A hard query sees more than so many keys, if one does.
_SEVERAL = 8
# So many last keys may be zeros, if they are at most an eighth of all.
_TAILS = (1, 4, 16, 64)


@torch.no_grad()
def rare_inputs(case: Case, normal: Inputs) -> Iterator[Rare]:
    """Yield inputs with a hard row of q, of k, and with a sink; none where normal scores never reach that far.

    That is at fp8, and with few channels. With a softcap there is no sink.

    Args:
        case: the problem.
        normal: its inputs, which stay as they are.
    """
    if case.quantised or case.head_dim < _LEAST_DIM or normal.kind != NORMAL:
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
        of_half = of_half if len(of_half) else sees
        # One that sees several keys, if there is any.
        several = of_half[(last - first)[of_half] >= _SEVERAL]
        query = drawn(several if len(several) else of_half)
        lowest, highest = int(first[query]), int(last[query])
        if hard == "k" and late:
            highest = max(lowest, min(highest, case.kv_len // 2 - 1))
        elif hard == "k":
            lowest = min(highest, max(lowest, case.kv_len // 2))
        others = [one for one in (drawn(sees) for _ in range(_OTHERS)) if one != query]
        score = _SCORE if case.softcap is None else _OVER_SOFTCAP * case.softcap
        if hard == "q":
            at_end = (last == case.kv_len - 1).nonzero().squeeze(1)
            others += [drawn(at_end)] if len(at_end) else []
            inputs = _hard_query(
                case, normal, dice, (batch, head, kv_head), query, (lowest, highest), others, score, late
            )
        else:
            key, k = dice.randint(lowest, highest), normal.k_bhsd.detach().clone()
            row = normal.q_bhsd.detach()[batch, head, query].float()
            k[batch, kv_head, key] = row * (score * case.head_dim**0.5 / row.square().sum())
            inputs = replace(normal, k_bhsd=k)
        if inputs is not None:
            beside = {((batch + 1) % case.batch, head), (batch, (head + 1) % case.q_heads)} - {(batch, head)}
            queries = torch.tensor([query, *others])
            yield Rare(case, inputs, hard, batch, head, queries, tuple(sorted(beside)) if hard == "q" else ())
    enough = sees_enough(case, first, last)
    if len(enough):
        yield with_sink(case, normal, dice, lambda: drawn(enough), _OTHERS)


def _hard_query(
    case: Case,
    normal: Inputs,
    dice: SystemRandom,
    place: tuple[int, int, int],
    query: int,
    seen: tuple[int, int],
    others: list[int],
    score: float,
    late: bool,
) -> Inputs | None:
    """Return inputs with a hard row of q, or None if other keys come too near.

    Args:
        case: the problem.
        normal: its inputs.
        dice: draws keys.
        place: the row of the batch, the query head and its key-value head.
        query: the hard row.
        seen: the first and the last key that it sees.
        others: other queries that are judged, which become faint; gets one of zeros.
        score: the largest one.
        late: whether its key is among the last half of those that it sees.
    """
    batch, head, kv_head = place
    lowest, highest = seen
    q, k, v = (one.detach().clone() for one in normal.qkv)
    tail = dice.choice([length for length in _TAILS if 8 * length <= case.kv_len] or [0])
    if highest >= case.kv_len - tail:
        tail, highest = (tail, case.kv_len - tail - 1) if lowest < case.kv_len - tail else (0, highest)
    visible, root = k[batch, kv_head, lowest : highest + 1].float(), case.head_dim**0.5
    # A late query's key is late, too: that of the hard row of k is early then.
    earliest = len(visible) // 2 if late else 0
    candidates = torch.tensor([dice.randrange(earliest, len(visible)) for _ in range(_CANDIDATES)], device=k.device)
    # What the scores of others are of a candidate's own.
    shares = visible[candidates] @ visible.mT / visible[candidates].square().sum(-1, keepdim=True)
    shares[torch.arange(_CANDIDATES), candidates] = 0.0
    nearest, best = shares.amax(-1).min(0)
    gap, key = float(score * (1 - nearest)), lowest + int(candidates[best])
    if case.softcap is None and gap < _GAP / 3:
        return None
    k_row = k[batch, kv_head, key].float()
    others[:] = [one for one in others if one != query]
    octaves = torch.tensor([dice.randrange(_OCTAVES) for _ in others], device=q.device)
    q[batch, head, others] *= torch.exp2(-octaves.float()).to(q.dtype).unsqueeze(-1)
    if case.q_len > 1:
        # In all heads, as a token of padding has them: its weights are equal.
        nothing = dice.choice([one for one in range(case.q_len) if one != query])
        q[:, :, nothing] = 0.0
        others += [nothing] if highest >= lowest and _sees_any(case, nothing) else []
    q[batch, head, query] = (k_row * (score * root / k_row.square().sum())).to(q.dtype)
    # Any key but the first one, if there is another.
    second = lowest + (key - lowest + dice.randrange(1, max(2, len(visible)))) % len(visible)
    zeros = dice.randrange(case.kv_len)
    for first_key, count in ((zeros, 1), (case.kv_len - tail, tail)):
        if count and first_key not in (key, second) and (count == tail or first_key < case.kv_len - tail):
            several = slice(first_key, first_key + count)
            k[:, :, several] = 0.0
            v[batch, kv_head, several] *= 2.0 ** round(math.log2(_VALUE * (case.kv_len / count) ** 0.5))
    if second != key:
        k[batch, kv_head, second] = (k_row * _SECOND).to(k.dtype)
    if case.softcap is None and gap >= _GAP:
        v[batch, kv_head, key] *= 2.0 ** _TINY.get(case.dtype, 0)
    return replace(normal, q_bhsd=q, k_bhsd=k, v_bhsd=v)


def _sees_any(case: Case, query: int) -> bool:
    first, last = seen_keys(case, torch.tensor([query]))
    return bool(last >= first)
