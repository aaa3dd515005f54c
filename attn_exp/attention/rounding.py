"""Whether a result in 16 bits is as exact as kernels of its dtype: a less exact one shows it in every head.

Fused kernels keep scores in float32: a head's error is the rounding of its weights and of its result, 0.6 of a unit.
The plain formula also rounds scores, and its error is three times as large. A tolerance made for it allows rounding in
yet another place, such as codes of int8 or a log-sum-exp in bf16. But rounding to nearest is deterministic: the same
products rounded to the same dtype have the same errors. So an error larger than a fused kernel's must have the
direction of errors of formulas that round scores.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch

from attn_exp.attention.biases import added_scores
from attn_exp.attention.error_parts import UNIT, weighed_rows
from attn_exp.attention.expected import Expected
from attn_exp.attention.formula import hidden_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import SLICE_BYTES
from attn_exp.attention.sampling import Places
from attn_exp.attention.sinks import sinks_at, softmax
from attn_exp.core.case.case import Case
from attn_exp.core.text import apart

Results = dict[str, torch.Tensor]
Rounded = Literal["operators", "products", "biases"]
# A head of fewer queries is no statistic: all heads are then judged together, in so many of them.
_FEW_QUERIES, _MOST_HEADS = 64, 64
# By this share, over the square root of the number of queries, these may happen to round more than others.
_SLACK = 2.0
# One row in so many is left out: the worst rows. Under a causal mask dq of the first rows is large and may be what is
# left of a cancellation. If one of them is among the 276 sampled rows of a head of 8,192, it is most of their error. In
# the fused formula 0.14 % of 60,000 such heads were beyond the bound by one row, and one of cuDNN's.
_LEFT_OUT_OF = 64
_GROUPED = ("out", "dq")


@torch.no_grad()
def loose_head(case: Case, inputs: Inputs, expected: Expected, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return which head of a result is less exact than its dtype as a sentence, or None.

    Only tensors with a tolerance `usual` are looked at, and of all heads the one that is furthest off. Inputs are
    normal numbers that are not codes.
    """
    together = case.q_len < _FEW_QUERIES
    queries = case.q_len * (case.batch * case.q_heads if together else 1)
    slack = 1 + _SLACK * queries**-0.5
    beyond = {name: found for name in tensors if (found := _worst_head(name, tensors[name], expected, slack, together))}
    if not beyond:
        return None
    group, several = case.q_heads // case.kv_heads, case.batch * case.kv_heads
    _, head, worst = max((ratio, head, name) for name, (ratio, head) in beyond.items())
    heads = range(0, several, -(-several // _MOST_HEADS)) if together else [head // (group if worst in _GROUPED else 1)]
    known: list[tuple[Results, ...]] = []
    for name in beyond:
        chosen = [_of_group(name, tensors[name], expected, head, group) for head in heads]
        if None in chosen:
            # The reference has dk and dv of only some heads.
            continue
        known = known or [
            _rounded_otherwise(case, inputs, head, with_gradients=list(beyond) != ["out"]) for head in heads
        ]
        whole = [one for one in chosen if one]
        got, right = (torch.cat([weighed_rows(name, one[index], one[1]) for one in whole]) for index in (0, 1))
        directions = [
            torch.cat(
                [
                    weighed_rows(name, _rows(name, one[way][name], expected, at, group), like)
                    for one, at, (_, like) in zip(known, heads, whole, strict=True)
                ]
            )
            for way in range(len(known[0]))
        ]
        kept = _without_worst((got - right).square().sum(-1), together)
        off, *ways = ((one - right)[kept].flatten() for one in (got, *directions))
        norm, allowed = float(right[kept].norm()), slack * (expected.tolerances[name].usual or math.inf)
        left = _unexplained(off, torch.stack(ways, -1)) / norm
        if not left <= allowed:
            of, most = apart(float(off.norm()) / norm, allowed)
            where = "" if together else _place(case, name, heads[0])
            return (
                f"{name}{where} is off by {of} of its norm, and rounding scores to {case.dtype} does not explain it: "
                f"allowed is {most}"
            )
    return None


def _place(case: Case, name: str, head: int) -> str:
    batch, head = divmod(head, case.kv_heads)
    group = case.q_heads // case.kv_heads if name in _GROUPED else 1
    first = head * group
    which = f"heads {first} to {first + group - 1}" if group > 1 else f"head {first}"
    return f" in {which} of batch row {batch}"


def _without_worst(off: torch.Tensor, together: bool) -> torch.Tensor:
    """Return which rows (heads, n) are judged: of each head, or of all together, all but the few with most error."""
    pooled = off.reshape(1, -1) if together else off
    worst = pooled.topk(pooled.shape[-1] // _LEFT_OUT_OF, dim=-1).indices
    return torch.ones_like(pooled, dtype=torch.bool).scatter_(-1, worst, False).view(off.shape)


def _worst_head(
    name: str, tensor: torch.Tensor, expected: Expected, slack: float, together: bool
) -> tuple[float, int] | None:
    """Return how far beyond what is usual the worst head is, and which of all rows of the batch; None if it is not."""
    reference, usual = expected.tensors[name], expected.tolerances[name].usual
    if usual is None:
        return None
    places, unit = expected.places.get(name), expected.units.get(name, UNIT)
    rows = tensor.detach() if places is None else places.of(tensor)
    several = []
    for one, right in zip(rows, reference, strict=True):
        like = weighed_rows(name, right, right)
        several.append([part.square().sum(-1) for part in (weighed_rows(name, one.float(), right) - like, like)])
    by_row = [torch.cat(parts) for parts in zip(*several, strict=True)]
    kept = _without_worst(by_row[0], together)
    off, norms = (part.masked_fill(~kept, 0.0).sum(-1).cpu().double() for part in by_row)
    # A head of which nothing is left but rounding has no relative error.
    off = off.masked_fill_(norms <= reference[0, 0].numel() * unit.least**2, 0.0)
    share = (
        off.sum(0, keepdim=True) / norms.sum() if together else off / norms.clamp(min=torch.finfo(torch.float64).tiny)
    )
    at = int(share.argmax())
    ratio = float(share[at]) ** 0.5 / (slack * usual)
    return (ratio, at if places is None else int(places.heads[at])) if ratio > 1 else None


def _of_group(
    name: str, tensor: torch.Tensor, expected: Expected, head: int, group: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return rows (heads, n, dim) of a tensor and of its reference, of a key-value head or of the queries' heads on it.

    There is no reference if that head was not drawn.
    """
    places, reference = expected.places.get(name), expected.tensors[name]
    several = group if name in _GROUPED else 1
    if places is None:
        of_head = slice(head * several, head * several + several)
        return tensor.detach().flatten(0, 1)[of_head].float(), reference.flatten(0, 1)[of_head]
    at = (places.heads // several == head).nonzero().squeeze(1)
    if not len(at):
        return None
    few = Places(places.heads[at], places.rows[at], places.heads_of_batch_row)
    return few.of(tensor)[0].float(), reference[0, at]


def _rows(name: str, whole: torch.Tensor, expected: Expected, head: int, group: int) -> torch.Tensor:
    """Return of (heads, length, dim) the rows that the reference has of these heads."""
    places = expected.places.get(name)
    if places is None:
        return whole
    rows = places.rows[places.heads // (group if name in _GROUPED else 1) == head].to(whole.device)
    return whole.gather(1, rows.unsqueeze(-1).expand(-1, -1, whole.shape[-1]))


def _rounded_otherwise(case: Case, inputs: Inputs, head: int, *, with_gradients: bool) -> tuple[Results, ...]:
    # The multiples of slopes are numbers of many digits, and a tensor of them has those of the dtype.
    ways: tuple[Rounded, ...] = ("operators", "products", *(("biases",) if case.alibi else ()))
    return tuple(scores_rounded(case, inputs, head, way, with_gradients=with_gradients) for way in ways)


def _unexplained(off: torch.Tensor, directions: torch.Tensor) -> float:
    """Return the norm of what is left of an error without its projection on the directions (elements, n)."""
    off, directions = off.double(), directions.double()
    size = directions.norm(dim=0)
    directions = directions / size.clamp(min=torch.finfo(torch.float64).tiny)
    products, along = directions.mT @ directions, directions.mT @ off
    # A direction may vanish, and two may be one.
    products += 1e-9 * torch.eye(len(products), dtype=torch.float64, device=products.device)
    left: float = (off - directions @ torch.linalg.solve(products, along)).norm().item()
    return left


def scores_rounded(case: Case, inputs: Inputs, head: int, rounded: Rounded, *, with_gradients: bool) -> Results:
    """Return the results of a key-value head of the batch by a formula that rounds scores to the case's dtype.

    `operators` rounds all results, as the plain formula does. `products` rounds operands and results of matrix
    products, and biases, as compilers do that fuse the rest. `biases` rounds of the terms of scores only biases, as a
    fused kernel that reads them from a tensor.

    Returns:
        `out` and `dq` of the heads that share it, (group, q_len, dim), `dk` and `dv` (1, kv_len, dim), in float32.
    """
    group, scale = case.q_heads // case.kv_heads, case.head_dim**-0.5
    dtype = inputs.q_bhsd.dtype

    def written(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    between = written if rounded == "operators" else lambda x: x
    of_product = between if rounded == "biases" else written
    q, d_out = (
        one.detach().reshape(-1, group, case.q_len, one.shape[-1])[head].float()
        for one in (inputs.q_bhsd, inputs.d_out_bhsd)
    )
    k, v = (one.detach().flatten(0, 1)[head].float() for one in (inputs.k_bhsd, inputs.v_bhsd))
    heads, keys = head * group + torch.arange(group, device=q.device), torch.arange(case.kv_len, device=q.device)
    sinks = sinks_at(case, heads)
    sinks = None if sinks is None else sinks[:, None, None]
    made: dict[str, list[torch.Tensor]] = {"out": [], "dq": []}
    dk, dv = (torch.zeros(group, *one.shape, device=one.device) for one in (k, v))
    step = max(1, SLICE_BYTES[q.device.type] // (4 * group * case.kv_len))
    for first in range(0, case.q_len, step):
        rows = slice(first, min(first + step, case.q_len))
        scores = between(of_product(q[:, rows] @ k.mT) * scale)
        if case.softcap is not None:
            bent = between(torch.tanh(between(scores / case.softcap)))
            scores = between(bent * case.softcap)
        added = added_scores(case, heads, torch.arange(rows.start, rows.stop, device=q.device), keys)
        if added is not None:
            scores = between(scores + written(added))
        if not case.dense:
            hidden = hidden_keys(case, rows.start, rows.stop - rows.start, scores.device)
            scores = scores.masked_fill(hidden, -torch.inf)
        exact = softmax(scores, sinks)
        if case.keyless:
            exact = exact.nan_to_num_(0.0)
        p = written(exact)
        made["out"].append(written(p @ v))
        if not with_gradients:
            continue
        weights, dp = p if rounded == "operators" else exact, of_product(d_out[:, rows] @ v.mT)
        ds = between(weights * (dp - (weights * dp).sum(-1, keepdim=True)))
        if case.softcap is not None:
            ds = between(between(between(ds * case.softcap) * (1 - bent * bent)) / case.softcap)
        ds = written(ds * scale)
        made["dq"].append(written(ds @ k))
        dk += ds.mT @ q[:, rows]
        dv += p.mT @ d_out[:, rows]
    results = {name: torch.cat(several, 1) for name, several in made.items() if several}
    if with_gradients:
        results |= {name: written(written(one).sum(0, keepdim=True)) for name, one in (("dk", dk), ("dv", dv))}
    return results
