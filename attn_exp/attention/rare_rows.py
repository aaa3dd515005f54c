"""One hard row among normal ones, at a place that is drawn anew, or one head with a sink.

A kernel that looks at a sample of its rows, or at a mean of all, and leaves out what only hard ones need where these
look normal, is right on inputs that are all normal and on inputs that are hard everywhere. Here a single row of q, or
of k, makes one score so large that its exponential overflows. The hard row of q and that of k are in different halves
of their tensors, so that who looks at only the first tiles finds both normal at most once.

Beside the row of q a second key's score is too large for an exponential, and still far below the first one's: who
clamps scores takes them for equal, and who leaves out a softcap for different. The value of the second key is as large
as the first one's and orthogonal to it, so that either mistake shows whatever the values are. The first key's is then
made so tiny that nothing is in fp16. There is a key of zeros, as those of padding are, whose value is large, and the
last keys are zeros in all heads, as the unused end of a cache is: keys like others, that no mask hides, each among
those that a judged query sees. Other queries of the head are faint, and one is zeros in all heads. The same query is
judged in another row of the batch and in another head, too.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.attention.rare import OF_SHARP, Rare
from attn_exp.attention.rare_draw import Draw
from attn_exp.attention.rare_sinks import sees_enough, with_sink
from attn_exp.core.case import NORMAL, Case

# exp overflows beyond 88.7. Other keys of the row then score 80 to 110 at most, with fewer than 32 channels 130: of so
# many keys that is the one whose row has the widest gap. A softcap is passed by as much.
_SCORE, _SECOND, _OVER_SOFTCAP, _CANDIDATES, _GAP = 160.0, 0.8125, 3.2, 16, 30.0
# With fewer channels other keys come nearer.
_LEAST_DIM = 16
# The power of two by which the hard key's value is smaller: fp16's numbers end at 2^-24.
_TINY = {"bfloat16": -27, "float32": -27}
# The powers of two by which other queries of the head of a hard one are smaller.
_OCTAVES = range(1, 7)
# Rows of the head that are judged with the hard one.
_OTHERS = 32
# The value of the key of zeros, over the square root of the number of keys: an eighth of a row's norm and more. By it
# the mean square of the head grows by a third at most: more would show in that of a tensor of few heads.
_VALUE = 0.4
# So many last keys may be zeros, if they are at most an eighth of all.
_TAILS = (1, 4, 16, 64)


@torch.no_grad()
def rare_inputs(case: Case, normal: Inputs) -> Iterator[Rare]:
    """Yield inputs with a hard row of q, of k, and with a sink; none where normal scores never reach that far.

    That is at fp8, and with few channels; under ALiBi keys far away have no weight however they score. With a softcap,
    learned sinks or a bias there is no sink among the keys. The backward that is judged is that of the last ones, or
    where these have no sink that of the row of q.

    Args:
        case: the problem.
        normal: its inputs, which stay as they are.
    """
    if case.quantised or case.alibi or case.head_dim < _LEAST_DIM or normal.kind != NORMAL:
        return
    draw = Draw.of(case, normal)
    if not len(draw.queries()):
        return
    # Which half of the queries, or of the keys, a hard row is in.
    late = draw.dice.random() < 1 / 2
    enough = sees_enough(draw)
    if (of_query := _hard_query(draw, late=late, with_backward=not len(enough))) is not None:
        yield of_query
    yield _hard_key(draw, late=not late)
    if len(enough):
        yield with_sink(draw, enough, _OTHERS)


def _score(case: Case) -> float:
    return _SCORE if case.softcap is None else _OVER_SOFTCAP * case.softcap


def _hard_key(draw: Draw, *, late: bool) -> Rare:
    """Return inputs with a hard row of k, in the later half of the keys if `late` and if a query sees them."""
    case, half = draw.case, draw.case.kv_len // 2
    batch, head, kv_head = draw.place()
    query = draw.one(draw.queries(draw.last >= half, draw.several))
    lowest, highest = int(draw.first[query]), int(draw.last[query])
    if late:
        lowest = min(highest, max(lowest, half))
    else:
        highest = max(lowest, min(highest, half - 1))
    k, row = draw.normal.k_bhsd.detach().clone(), draw.normal.q_bhsd.detach()[batch, head, query].float()
    k[batch, kv_head, draw.dice.randint(lowest, highest)] = row * (
        _score(case) * case.head_dim**0.5 / row.square().sum()
    )
    queries = [query, *(one for one in draw.many(draw.queries(), _OTHERS) if one != query)]
    # Scores of other rows become sharp. The row with the large one is the value of its key, but with a softcap.
    sharp = OF_SHARP[case.dtype]
    slack = [0.0 if case.softcap is None else sharp, *(sharp for _ in queries[1:])]
    return Rare(case, replace(draw.normal, k_bhsd=k), "k", batch, head, torch.tensor(queries), torch.tensor(slack))


def _hard_query(draw: Draw, *, late: bool, with_backward: bool) -> Rare | None:
    """Return inputs with a hard row of q, in the later half of the queries if `late`; None if other keys come too near.

    Its key is then among the last half of those that it sees: that of the hard row of k is early.
    """
    case, dice = draw.case, draw.dice
    batch, head, kv_head = place = draw.place()
    at_end, index = draw.last == case.kv_len - 1, torch.arange(case.q_len)
    # Another one sees the last keys.
    spared = [~at_end] if int(at_end.sum()) == 1 else []
    query = draw.one(draw.queries((index >= case.q_len // 2) == late, draw.several, *spared))
    lowest, highest = int(draw.first[query]), int(draw.last[query])
    # It sees two keys before those that are zeros.
    tail = dice.choice([one for one in _TAILS if 8 * one <= case.kv_len and lowest + 1 < case.kv_len - one] or [0])
    highest = min(highest, case.kv_len - tail - 1)
    q, k, v = (one.detach().clone() for one in draw.normal.qkv)
    key, gap = _lonely_key(draw, k[batch, kv_head, lowest : highest + 1].float(), late=late)
    key += lowest
    if case.softcap is None and gap < _GAP / 3:
        return None
    others = draw.many(draw.queries(index != query), _OTHERS) if case.q_len > 1 else []
    others = [one for one in others if one != query]
    others += [one for one in draw.many(draw.queries(at_end), 1) if one not in (query, *others)]
    octaves = torch.tensor([-float(dice.choice(_OCTAVES)) for _ in others], device=q.device)
    q[batch, head, others] *= torch.exp2(octaves).to(q.dtype).unsqueeze(-1)
    if others:
        # In all heads, as a token of padding has them: its weights are equal.
        q[:, :, dice.choice(others)] = 0.0
    k_row = k[batch, kv_head, key].float()
    q[batch, head, query] = (k_row * (_score(case) * case.head_dim**0.5 / k_row.square().sum())).to(q.dtype)
    second = draw.key(lowest, highest, [key])
    if second is not None:
        k[batch, kv_head, second] = (k_row * _SECOND).to(k.dtype)
        v[batch, kv_head, second] = _turned(v[batch, kv_head, key])
    if case.softcap is None and gap >= _GAP:
        v[batch, kv_head, key] *= 2.0 ** _TINY.get(case.dtype, 0)
    for several in _zeros(draw, [*others, query][0], (key, -1 if second is None else second), tail):
        k[:, :, several] = 0.0
        count = several.stop - several.start
        v[batch, kv_head, several] *= 2.0 ** round(math.log2(_VALUE * (case.kv_len / count) ** 0.5))
    beside = {((batch + 1) % case.batch, head), (batch, (head + 1) % case.q_heads)} - {place[:2]}
    inputs, queries = replace(draw.normal, q_bhsd=q, k_bhsd=k, v_bhsd=v), torch.tensor([query, *others])
    # The row is the value at its key, but with a softcap, to which two scores are near.
    slack = torch.full((len(queries),), 0.0 if case.softcap is None else OF_SHARP[case.dtype])
    rare = Rare(case, inputs, "q", batch, head, queries, slack, beside=tuple(sorted(beside)))
    # Along the first value and not the second one, so that the difference that dq is made of does not cancel.
    return draw.with_backward(rare, v[batch, kv_head, key]) if with_backward else rare


def _lonely_key(draw: Draw, visible: torch.Tensor, *, late: bool) -> tuple[int, float]:
    """Return the one of some visible keys that the others are furthest from, and the gap between the largest scores."""
    earliest = len(visible) // 2 if late else 0
    several = range(earliest, len(visible))
    candidates = torch.tensor(draw.dice.sample(several, min(_CANDIDATES, len(several))), device=visible.device)
    # What the scores of others are of a candidate's own.
    shares = visible[candidates] @ visible.mT / visible[candidates].square().sum(-1, keepdim=True)
    shares[torch.arange(len(candidates)), candidates] = 0.0
    nearest, best = shares.amax(-1).min(0)
    return int(candidates[best]), float(_score(draw.case) * (1 - nearest))


def _turned(row: torch.Tensor) -> torch.Tensor:
    """Return a row of the same norm that is orthogonal to a row, but for an odd number of channels."""
    turned, even = row.clone(), len(row) // 2 * 2
    turned[0:even:2], turned[1:even:2] = -row[1:even:2], row[0:even:2]
    return turned


def _zeros(draw: Draw, seen_by: int, besides: tuple[int, int], tail: int) -> Iterator[slice]:
    """Yield which keys are zeros: one that a query sees, and the last ones."""
    begin = draw.case.kv_len - tail
    one = draw.key(int(draw.first[seen_by]), min(int(draw.last[seen_by]), begin - 1), besides)
    if one is not None:
        yield slice(one, one + 1)
    if tail:
        yield slice(begin, draw.case.kv_len)
