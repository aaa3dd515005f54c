"""Rows of some heads in float64: what a query's result is, and what each key adds to it."""

from dataclasses import dataclass

import torch

from attn_exp.attention.biases import added_scores
from attn_exp.attention.formula import scored_with_slope, seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.sampling import Places, boundary_rows, fresh_dice
from attn_exp.attention.sinks import log_sum, sinks_at
from attn_exp.core.case.case import Case

# Scores of one head's sampled rows, and boundary keys of all heads: limits of float64 memory and of time.
_SCORES = {"cuda": 1 << 21, "cpu": 1 << 16}
_KEYS = {"cuda": 1 << 20, "cpu": 1 << 17}
_MOST_ROWS = {"cuda": 256, "cpu": 96}
_MOST_HEADS = {"cuda": 8, "cpu": 4}
# Beside the boundary rows, this many at random at least.
_RANDOM_ROWS = 12


@dataclass(frozen=True)
class Gradient:
    """The backward at the sampled rows: dq, and what each key adds to it, `d_scores` x `keys` (heads, kv_len, dim).

    `d_scores` (heads, rows, kv_len) of hidden keys are those that they would have if they were visible.
    """

    dq: torch.Tensor
    d_scores: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class EdgeSample:
    """Sampled rows of some heads.

    Attributes:
        places: the heads and the queries.
        first: the first key that each query sees, on the CPU.
        last: the last one, on the CPU.
        weights: (heads, rows, kv_len); hidden keys have the weights that they would have among the visible ones.
        visible: the same with zeros for hidden keys.
        values: (heads, kv_len, value_dim).
        out: (heads, rows, value_dim).
        by_scale: the derivative of `out` with respect to the logarithm of the scores' scale.
        spread: the number of keys with the weight, 1 / sum(p^2); 0 for a query that sees no key. (heads, rows).
        gradient: the backward, None if it is not asked for.
    """

    places: Places
    first: torch.Tensor
    last: torch.Tensor
    weights: torch.Tensor
    visible: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    by_scale: torch.Tensor
    spread: torch.Tensor
    gradient: Gradient | None

    def error(self, out_bhsd: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the error of a backend's output at the sampled rows."""
        return _rows_of(self.places, out_bhsd) * scale - self.out

    def dq_error(self, dq_bhsd: torch.Tensor) -> torch.Tensor:
        """Return the error of a backend's dq at the sampled rows."""
        assert self.gradient is not None
        return _rows_of(self.places, dq_bhsd) - self.gradient.dq


def edge_sample(case: Case, inputs: Inputs, *, with_gradients: bool) -> EdgeSample:
    """Draw rows and heads, and compute them."""
    inputs = inputs.numbers()
    device = inputs.q_bhsd.device
    dice = fresh_dice()
    most = max(1, min(_MOST_HEADS[device.type], _KEYS[device.type] // case.kv_len))
    heads = torch.randperm(case.batch * case.q_heads, generator=dice)[:most]
    chosen = _rows(case, device.type, dice)
    first, last = seen_keys(case, chosen)
    rows = chosen.to(device)
    batch, q_head = (heads // case.q_heads).to(device), (heads % case.q_heads).to(device)
    kv_head = q_head // (case.q_heads // case.kv_heads)
    places = Places(heads.to(device), rows.expand(len(heads), -1), case.q_heads)
    q = _rows_of(places, inputs.q_bhsd)
    k, v = inputs.k_bhsd[batch, kv_head].double(), inputs.v_bhsd[batch, kv_head].double()
    scores = q @ k.mT * case.head_dim**-0.5
    # The derivatives of the capped scores with respect to scores and to the logarithm of their scale.
    uncapped = scores
    scores, slope = scored_with_slope(case, scores)
    by_scale = uncapped if slope is None else uncapped * slope
    key = torch.arange(case.kv_len)
    added = added_scores(case, q_head, rows, key.to(device), scores.dtype)
    scores = scores if added is None else scores + added
    hidden = ((key < first[:, None]) | (key > last[:, None])).to(device)
    seen = scores.masked_fill(hidden, -torch.inf)
    sinks = sinks_at(case, q_head)
    weights = (scores - log_sum(seen, None if sinks is None else sinks[:, None, None])).exp()
    visible = weights.masked_fill(hidden, 0.0)
    out = visible @ v
    spread = (1 / visible.square().sum(-1)).masked_fill((first > last).to(device), 0.0)
    mean = (visible * by_scale).sum(-1, keepdim=True)
    gradient = None
    if with_gradients:
        d_out = _rows_of(places, inputs.d_out_bhsd)
        d_scores = weights * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * case.head_dim**-0.5
        d_scores = d_scores if slope is None else d_scores * slope
        gradient = Gradient(d_scores.masked_fill(hidden, 0.0) @ k, d_scores, k)
    moved = (visible * (by_scale - mean)) @ v
    return EdgeSample(places, first, last, weights, visible, v, out, moved, spread, gradient)


def _rows(case: Case, device: str, dice: torch.Generator) -> torch.Tensor:
    """Return the rows at boundaries and others at random, ascending."""
    always = torch.tensor(boundary_rows(case.q_len))
    count = min(case.q_len, _MOST_ROWS[device], max(len(always) + _RANDOM_ROWS, _SCORES[device] // case.kv_len))
    order = torch.randperm(case.q_len, generator=dice)
    others = order[~torch.isin(order, always)][: count - len(always)]
    return torch.cat([always, others]).sort().values


def _rows_of(places: Places, tensor: torch.Tensor) -> torch.Tensor:
    return places.of(tensor)[0].double()
