"""Probes: a few rows of each head of many timed calls, so that also a call that nobody drew as a whole is looked at.

Rows of `out` and dq need only their own queries and the keys of their head, and those of all probes of a pass are
computed together: a probe costs as much as a call with two queries. Gradients of keys have sums that need no reference
(attn_exp/attention/head_sums.py); both sides of these are taken from what the call read and returned.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attn_exp.attention.biases import added_scores
from attn_exp.attention.error_parts import VANISHING
from attn_exp.attention.formula import masked, seen_keys
from attn_exp.attention.fresh_inputs import State, rows_of, sign_factors
from attn_exp.attention.head_sums import allowed_sum
from attn_exp.attention.inputs import Inputs, Scales
from attn_exp.attention.reference import capped
from attn_exp.attention.sampling import Places, fresh_dice
from attn_exp.attention.sinks import sinks_at, softmax
from attn_exp.core.case import Case

# Rows of a head, and at least so many of all heads.
_ROWS, _LEAST_ROWS = 2, 16
# Late rows of a causal mask are a third of the usual size.
_LEAST = 0.3
# Keys of all heads that are looked at, and scores that are computed together.
_KEYS = {"cuda": 1 << 20, "cpu": 1 << 17}
_SCORES = {"cuda": 1 << 26, "cpu": 1 << 23}


@dataclass(frozen=True)
class Probe:
    """A few rows of one timed call's `out`, or dq.

    Attributes:
        places: which rows of which heads, (heads, n).
        rows: their numbers, or codes, (heads, n, dim).
        state: how the inputs of the call differed from those of the seed.
        index: which call of its pass it was, from 1 on.
        scale: the factor of its rows if they are codes.
    """

    places: Places
    rows: torch.Tensor
    state: State
    index: int
    scale: float = 1.0


def draw_places(case: Case, device: torch.device, count: int) -> list[Places]:
    """Return `count` times random rows of the same heads: of all, or of as many random ones as are affordable."""
    dice, group = fresh_dice(), case.q_heads // case.kv_heads
    of_keys = torch.randperm(case.batch * case.kv_heads, generator=dice)[: max(1, _KEYS[device.type] // case.kv_len)]
    heads = (of_keys.sort().values[:, None] * group + torch.arange(group)).flatten()
    rows = min(case.q_len, max(_ROWS, -(-_LEAST_ROWS // len(heads))))
    drawn = torch.randint(case.q_len, (count, len(heads), rows), generator=dice)
    heads = heads.to(device)
    return [Places(heads, some, case.q_heads) for some in drawn.to(device)]


@torch.no_grad()
def probe_errors(
    case: Case, seeded: Inputs, probes: Sequence[Probe], name: str, usual: float
) -> list[tuple[float, int]]:
    """Return the largest relative error of a head of each probe, infinite if it is not finite, and which head it is.

    Heads are counted over all rows of the batch.

    Args:
        case: the problem.
        seeded: the inputs of the seed.
        probes: of one pass.
        name: `out` or `dq`.
        usual: the root mean square of the whole tensor (see `usual_size`). Rows that nearly vanish beside it are not
            judged by their own norm.
    """
    places = probes[0].places
    # (heads, probes, n, dim), as the rows of one head are computed together.
    found = torch.stack([probe.rows.float() * probe.scale for probe in probes], 1)
    rows = torch.stack([probe.places.rows for probe in probes], 1)
    errors = []
    for some in _parts(case, len(places.heads), rows[0].numel(), found.device.type):
        wanted = _rows(case, seeded, Places(places.heads[some], rows[some], case.q_heads), probes, name)
        norms = wanted.flatten(2).norm(dim=-1).clamp(min=_LEAST * usual * wanted[0, 0].numel() ** 0.5)
        errors.append((found[some] - wanted).flatten(2).norm(dim=-1) / norms)
    worst, head = torch.cat(errors).nan_to_num(math.inf, math.inf).max(dim=0)
    return list(zip(worst.tolist(), places.heads[head].tolist(), strict=True))


def _parts(case: Case, heads: int, rows: int, device: str) -> Iterator[slice]:
    """Yield slices of query heads, whole groups of them, with a bounded number of scores and of keys."""
    group = case.q_heads // case.kv_heads
    fit = min(_KEYS[device], _SCORES[device] // (group * rows)) // case.kv_len
    step = max(1, fit) * group
    for begin in range(0, heads, step):
        yield slice(begin, begin + step)


def _rows(case: Case, seeded: Inputs, places: Places, probes: Sequence[Probe], name: str) -> torch.Tensor:
    """Return what the rows of `out` or `dq` should be, (heads, probes, n, dim) in float32.

    Signs of channels of k act on scores as those of q do, those of v on the output, and signs of rows on scores and
    weights: keys and values are copied once for all probes.

    Args:
        case: the problem.
        seeded: the inputs of the seed.
        places: the rows of each probe, (heads, probes, n).
        probes: their states.
        name: `out` or `dq`.
    """
    device, group, rows = seeded.q_bhsd.device, case.q_heads // case.kv_heads, places.rows
    scales = seeded.scales or Scales(1.0, 1.0, 1.0, 1.0)

    def signs(key: str, length: int) -> torch.Tensor:
        return sign_factors([probe.state.signs.get(key, 0) for probe in probes], length, device).unsqueeze(1)

    def numbers(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return tensor.float() if scale == 1.0 else tensor.float().mul_(scale)

    def queries(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        flat = Places(places.heads, rows.flatten(1), places.heads_of_batch_row)
        return numbers(flat.of(tensor).squeeze(0).unflatten(1, rows.shape[1:]), scale)

    def keys(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        of_keys = places.heads[::group] // group
        return numbers(tensor.detach()[of_keys // case.kv_heads, of_keys % case.kv_heads], scale)

    def times(some: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Multiply what the queries of each group have with a matrix of the keys that they share."""
        made = some.reshape(len(other), -1, some.shape[-1]) @ other
        return made.reshape(*rows.shape, -1)

    of_q, of_k = signs("q", case.head_dim), signs("k", case.head_dim)
    of_v, rows_of_v = signs("v", case.value_dim), signs(rows_of("v"), case.kv_len)
    rows_of_k = signs(rows_of("k"), case.kv_len)
    k, v = keys(seeded.k_bhsd, scales.k), keys(seeded.v_bhsd, scales.v)
    q = queries(seeded.q_bhsd, scales.q) * (of_q * of_k)
    scores, slope = capped(case, times(q, k.mT).mul_(rows_of_k * case.head_dim**-0.5))
    key = torch.arange(case.kv_len, device=device)
    added = added_scores(case, places.heads[:, None], rows, key)
    if added is not None:
        scores += added
    if masked(case):
        first, last = seen_keys(case, rows)
        scores.masked_fill_((key < first[..., None]) | (key > last[..., None]), float("-inf"))
    sinks = sinks_at(case, places.heads)
    weights = softmax(scores, None if sinks is None else sinks[:, None, None, None])
    if case.keyless:
        weights.nan_to_num_(0.0)
    out = times(weights * rows_of_v, v)
    if name == "out":
        return out.mul_(of_v)
    negated = torch.tensor([-1.0 if probe.state.negated else 1.0 for probe in probes], device=device)
    by_row = (signs(rows_of("d_out"), case.q_len) * negated[:, None, None]).squeeze(1).expand(len(rows), -1, -1)
    # In the basis in which v has the numbers of the seed.
    d_out = queries(seeded.d_out_bhsd, scales.d_out) * (signs("d_out", case.value_dim) * of_v)
    d_out *= by_row.gather(-1, rows).unsqueeze(-1)
    d_scores = times(d_out, v.mT).mul_(rows_of_v).sub_((d_out * out).sum(-1, keepdim=True)).mul_(weights)
    d_scores = d_scores if slope is None else d_scores * slope
    return times(d_scores * rows_of_k, k).mul_(of_k * case.head_dim**-0.5)


def usual_size(tensor: torch.Tensor) -> float:
    """Return the root mean square of a reference, or 1.0, the inputs' own, where it vanishes."""
    size = float(tensor.square().mean().sqrt())
    return size if size > VANISHING else 1.0


def allowed_error(relative: float) -> float:
    """Return the error that a probe may have where whole tensors may have `relative`, infinite if that is."""
    return max(allowed_sum(relative), 2 * relative) if math.isfinite(relative) else math.inf
