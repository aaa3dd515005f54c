"""Check whether an output misses a key at the boundary of a query's mask, or includes one beyond it.

Among thousands of keys, one key weighs less than 16-bit rounding, so norms of errors cannot show it. But it moves an
output in a known direction, v_j - out_i, while rounding spreads over all `value_dim` directions. The error is projected
onto that direction for a sample of rows, in float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case

# Scores of one head's sampled rows, and boundary keys of all heads: limits of float64 memory.
_SCORES = {"cuda": 1 << 21, "cpu": 1 << 17}
_KEYS = 1 << 17
_MOST_ROWS, _MOST_HEADS = 256, 8
# A key with nearly all the weight: its loss shows in the norms.
_HEAVIEST = 0.9
# The share of the key's movement, and the standard errors of the rounding around it.
_SHARE, _ERRORS = 0.5, 8.0
# With fewer directions the rounding of a single row is too uncertain to judge it.
_LEAST_DIM = 32
# One key, and blocks of keys. The nearest size still shows most of a block of another size.
_COUNTS = (1, 4, 16, 64)


@dataclass(frozen=True)
class _Sample:
    """Sampled rows of some heads.

    `weights` (heads, rows, kv_len) of hidden keys are those that they would have among the visible ones.
    """

    first: torch.Tensor
    last: torch.Tensor
    weights: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    error: torch.Tensor


@torch.no_grad()
def edge_error(case: Case, inputs: Inputs, out_bhsd: torch.Tensor) -> str | None:
    """Return what is wrong at the boundary of the mask as a sentence, or None.

    Codes are not checked: e4m3 cannot represent the weight of a single key among thousands.

    Args:
        case: the problem.
        inputs: its tensors.
        out_bhsd: a backend's output, (batch, q_heads, q_len, value_dim).
    """
    if case.quantised:
        return None
    sample = _sampled(case, inputs, out_bhsd)
    checks = [(what, *_moved(sample, keys, seen=seen)) for what, keys, seen in _edges(sample)]
    # A block of keys shows in each of its parts. Report the check that explains most rows, and nearest to entirely.
    moved = [one for one in checks if one[2]]
    if not moved:
        return None
    what, share, rows, of = max(moved, key=lambda one: (one[2] / one[3], -abs(one[1] - 1)))
    return f"out is as if {what}: {rows} of {of} sampled rows deviate by {share:.2f} of what that would cause"


def _edges(sample: _Sample) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield what could be wrong, the keys (rows, kv_len) concerned, and whether the rows should see them."""
    key = torch.arange(sample.values.shape[1], device=sample.out.device)
    first, last = sample.first[:, None], sample.last[:, None]
    seen = (key >= first) & (key <= last)
    for count in _COUNTS:
        keys = "key" if count == 1 else f"{count} keys"
        yield f"the last {keys} that a query sees were missing", seen & (key > last - count), True
        yield f"the first {keys} that a query sees were missing", seen & (key < first + count), True
    yield "the key after the last that a query sees were visible", key == last + 1, False
    yield "the key before the first that a query sees were visible", key == first - 1, False


def _sampled(case: Case, inputs: Inputs, out_bhsd: torch.Tensor) -> _Sample:
    device = out_bhsd.device
    dice = torch.Generator().manual_seed(case.kv_len)
    count = min(case.q_len, _MOST_ROWS, max(8, _SCORES[device.type] // case.kv_len))
    rows = torch.randperm(case.q_len, generator=dice)[:count].to(device)
    most = max(1, min(_MOST_HEADS, _KEYS // case.kv_len))
    heads = torch.randperm(case.batch * case.q_heads, generator=dice)[:most].to(device)
    batch, q_head = heads // case.q_heads, heads % case.q_heads
    kv_head = q_head // (case.q_heads // case.kv_heads)
    q = inputs.q_bhsd[batch, q_head][:, rows].double()
    k, v = inputs.k_bhsd[batch, kv_head].double(), inputs.v_bhsd[batch, kv_head].double()
    scores = q @ k.mT * case.head_dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    first, last = seen_keys(case, rows)
    key = torch.arange(case.kv_len, device=device)
    hidden = (key < first[:, None]) | (key > last[:, None])
    weights = (scores - scores.masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)).exp()
    out = weights.masked_fill(hidden, 0.0) @ v
    return _Sample(first, last, weights, v, out, out_bhsd[batch, q_head][:, rows].double() - out)


def _moved(sample: _Sample, keys: torch.Tensor, *, seen: bool) -> tuple[float, int, int]:
    """Return the share of the movement that wrong keys would cause (1 is all of it), in how many rows, and of how many.

    A row counts if rounding cannot explain it; all examined rows count if rounding cannot explain their sum.
    """
    dim = sample.values.shape[-1]
    weights = sample.weights * keys
    weight = weights.sum(-1)
    judged = (weight > 0) & (weight < _HEAVIEST) & (sample.first <= sample.last)
    if not judged.any():
        return 0.0, 0, 0
    weight, error = weight[judged], sample.error[judged]
    direction = (weights @ sample.values)[judged] / weight[:, None] - sample.out[judged]
    # Leaving out keys of weight p moves the output by -p / (1 - p) of (v - out); adding keys of weight w by w / (1 +
    # w).
    step = -weight / (1 - weight) if seen else weight / (1 + weight)
    length, along = direction.square().sum(-1), (error * direction).sum(-1)
    beside = (error.square().sum(-1) - along.square() / length).clamp(min=0) / max(1, dim - 1)
    known = step.square() * length
    share = (step * along).sum() / known.sum()
    if (share - 1).abs() < _SHARE and share > _ERRORS * (known * beside).sum().sqrt() / known.sum():
        return float(share), len(step), len(step)
    own = along / (step * length)
    clear = (own > _SHARE) & (own < 2) & (along.square() > _ERRORS**2 * beside * length)
    alone = int(clear.sum()) if dim >= _LEAST_DIM else 0
    return (float(own[clear].median()) if alone else 0.0), alone, len(step)
