"""Check whether a result misses keys at the boundary of a mask, includes keys beyond it, or scales scores wrongly.

Among thousands of keys, one key weighs less than 16-bit rounding, so norms of errors cannot show it. But it moves an
output in a known direction, v_j - out_i, while rounding spreads over all `value_dim` directions. The error is projected
onto that direction for a sample of rows, in float64; the same for dq, and for the derivative of the output with respect
to the scores' scale. Rows and heads are drawn from the operating system's entropy, beside those where kernels err.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attn_exp.attention.edge_sample import EdgeSample, edge_sample
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case

# A key with nearly all the weight: its loss shows in the norms.
_HEAVIEST = 0.9
# The share of the keys' movement, and the standard errors of the rounding around it.
_SHARE, _ERRORS = 0.5, 8.0
# With fewer directions the rounding of a single row is too uncertain to judge it.
_LEAST_DIM = 32
# Where few keys have the weight, rounding their weights moves the output along few directions, among them this one.
_LEAST_KEYS = 16.0
# One key, and blocks of keys. The nearest size still shows most of a block of another size.
_COUNTS = (1, 4, 16, 64)
# Units of the dtype by which the scores' scale may be off beside its noise.
_LEAST_NOISE = 0.1
_SCALE_UNITS, _SCALE_UNITS_OF_CODES = 0.05, 0.2
# Nobody holds the scale in more than float32, and SDPA's formula multiplies q and k by its root. Of 150 float32 cases
# with head dimensions of 6 to 128, 42 were off by a few roundoffs, which is more than their noise.
_SCALE_ROUNDING = 1e-5


@dataclass(frozen=True)
class _Move:
    """What an error would do: the movement of each row (heads, rows, dim), and the rows that it concerns."""

    what: str
    move: torch.Tensor
    concerned: torch.Tensor


@torch.no_grad()
def edge_error(
    case: Case,
    inputs: Inputs,
    out_bhsd: torch.Tensor,
    scale: float = 1.0,
    dq_bhsd: torch.Tensor | None = None,
) -> str | None:
    """Return what is wrong at the boundary of the mask, or with the scores' scale, as a sentence, or None.

    Args:
        case: the problem.
        inputs: its tensors.
        out_bhsd: a backend's output, (batch, q_heads, q_len, value_dim).
        scale: the factor of an output in codes.
        dq_bhsd: its gradient of q; at fp8 it is not checked, since codes of its scores' gradients lose small weights.
    """
    sample = edge_sample(case, inputs, with_gradients=dq_bhsd is not None and not case.quantised)
    wrong = _wrong("out", sample, sample.error(out_bhsd, scale), list(_moves_of_out(sample)))
    if wrong is None:
        wrong = _wrong_scale(case, sample, sample.error(out_bhsd, scale))
    if wrong is None and sample.gradient is not None and dq_bhsd is not None:
        wrong = _wrong("dq", sample, sample.dq_error(dq_bhsd), list(_moves_of_dq(sample)))
    return wrong


def _wrong(name: str, sample: EdgeSample, error: torch.Tensor, moves: list[_Move]) -> str | None:
    # A block of keys shows in each of its parts. Report what explains most rows, and nearest to entirely.
    found = [(one.what, *_follows(error, one, sample)) for one in moves]
    moved = [one for one in found if one[2]]
    if not moved:
        return None
    what, share, rows, of = max(moved, key=lambda one: (one[2] / one[3], -abs(one[1] - 1)))
    return f"{name} is as if {what}: {rows} of {of} sampled rows deviate by {share:.2f} of what that would cause"


def _blocks(sample: EdgeSample) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, bool]]:
    """Yield what could be wrong, the keys (rows, n) from the boundary on, which exist, and if they are seen."""
    step = torch.arange(max(_COUNTS), device=sample.first.device)
    first, last = sample.first[:, None], sample.last[:, None]
    after, before = last + 1 + step, first - 1 - step
    yield "the last {} that a query sees were missing", last - step, last - step >= first, True
    yield "the first {} that a query sees were missing", first + step, first + step <= last, True
    yield "the {} after the last that a query sees were visible", after, after < sample.weights.shape[-1], False
    yield "the {} before the first that a query sees were visible", before, before >= 0, False


def _counted(
    sample: EdgeSample, per_key: torch.Tensor, of: torch.Tensor
) -> Iterator[tuple[str, bool, torch.Tensor, torch.Tensor]]:
    """Yield, for blocks of keys, what could be wrong, if they are seen, their weight, and the sum of per_key x of."""
    for what, keys, exist, seen in _blocks(sample):
        if not exist.any():
            continue
        keys = keys.clamp(0, sample.weights.shape[-1] - 1)
        index = keys.expand(len(of), *keys.shape)
        weight, factor = (one.gather(-1, index) * exist for one in (sample.weights, per_key))
        same = bool((keys == keys[:1]).all())
        rows = of[:, keys[0]].unsqueeze(1) if same else of[:, keys]
        total, done = torch.zeros(*factor.shape[:2], of.shape[-1], dtype=of.dtype, device=of.device), 0
        for count in _COUNTS:
            part = slice(done, count)
            if not exist[:, part].any():
                break
            total = total + (factor[..., part].unsqueeze(-2) @ rows[..., part, :]).squeeze(-2)
            done = count
            yield what.format("key" if count == 1 else f"{count} keys"), seen, weight[..., :count].sum(-1), total


def _moves_of_out(sample: EdgeSample) -> Iterator[_Move]:
    for what, seen, weight, total in _counted(sample, sample.weights, sample.values):
        # Leaving out keys of weight p moves the output by -p / (1 - p) of (v - out); adding keys of weight w by w / (1
        # + w).
        sign = -1 / (1 - weight) if seen else 1 / (1 + weight)
        move = sign[..., None] * (total - weight[..., None] * sample.out)
        yield _Move(what, move, (weight > 0) & (weight < _HEAVIEST))


def _moves_of_dq(sample: EdgeSample) -> Iterator[_Move]:
    gradient = sample.gradient
    if gradient is None:
        return
    for what, seen, weight, total in _counted(sample, gradient.d_scores, gradient.keys):
        yield _Move(f"in the backward {what}", -total if seen else total, (weight > 0) & (weight < _HEAVIEST))


def _follows(error: torch.Tensor, one: _Move, sample: EdgeSample) -> tuple[float, int, int]:
    """Return the share of a movement in an error (1 is all of it), in how many rows, and of how many.

    A row counts if rounding cannot explain it; all examined rows count if rounding cannot explain their sum.
    """
    known = one.move.square().sum(-1)
    judged = one.concerned & (known > 0) & (sample.spread >= _LEAST_KEYS)
    if not judged.any():
        return 0.0, 0, 0
    error, move, known = error[judged], one.move[judged], known[judged]
    along = (error * move).sum(-1)
    beside = (error.square().sum(-1) - along.square() / known).clamp(min=0) / max(1, move.shape[-1] - 1)
    share = along.sum() / known.sum()
    if (share - 1).abs() < _SHARE and share > _ERRORS * (known * beside).sum().sqrt() / known.sum():
        return float(share), len(known), len(known)
    own = along / known
    clear = (own > _SHARE) & (own < 2) & (along.square() > _ERRORS**2 * beside * known)
    alone = int(clear.sum()) if move.shape[-1] >= _LEAST_DIM else 0
    return (float(own[clear].median()) if alone else 0.0), alone, len(known)


def _wrong_scale(case: Case, sample: EdgeSample, error: torch.Tensor) -> str | None:
    """Return by how much the scores are scaled wrongly as a sentence, or None."""
    judged = sample.spread >= _LEAST_KEYS
    error, move = error[judged], sample.by_scale[judged]
    known = move.square().sum(-1)
    if not known.sum() > 0:
        return None
    # A row counts by the inverse square of its error, as for a bias (attn_exp/attention/error_parts.py).
    square = error.square().sum(-1)
    weight = 1 / (square + _LEAST_NOISE**2 * square.sum() / known.sum() * known).clamp(
        min=torch.finfo(square.dtype).tiny
    )
    along, total = (error * move).sum(-1), (weight * known).sum()
    off = (weight * along).sum() / total
    noise = (weight * (along - off * known)).square().sum().sqrt() / total
    unit = torch.finfo(getattr(torch, case.dtype)).eps
    units = _SCALE_UNITS_OF_CODES if case.quantised else _SCALE_UNITS
    if len(known) < _LEAST_DIM or off.abs() <= max(units * unit, _SCALE_ROUNDING) + _ERRORS * noise:
        return None
    return f"out is as if scores were scaled by {float(1 + off):.4f} of what is right"
