"""Tolerances: how far a result of a dtype may be from the reference, measured and not chosen.

The formula in the case's dtype rounds after every operator; an error `FACTOR` times as large is a bug, not rounding.
The formula and the float32 reference are both compared with float64 on a part of the case. Rounding errors hardly
depend on the number of heads or rows.
"""

import math
from dataclasses import replace

import torch

from attn_exp.attention.error import Tolerance, judged_error, tensor_error
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.fused_formula import FEW_ROWS, fp8_formula, fused_formula, int8_formula, score_rounding
from attn_exp.attention.inputs import Inputs, autograd_backward, unit_of
from attn_exp.attention.reference import reference
from attn_exp.attention.scores import bias_tensor, sinks_of
from attn_exp.core.case.case import DTYPE_BYTES, INT8, NORMAL, Case
from attn_exp.core.case.masks import NO_NUMBER

FACTOR = 3.0
# One row in a million deviates more than one in the thousands that are sampled. In cuDNN's dq on an H200 it was 7 times
# the tensor's tolerance in bf16 (256 heads of 8,192 tokens), and 9.4 times in fp8 (64 heads of 16,384 tokens). A wrong
# row deviates by far more, except in fp8, where this bound is above 1.
WORST_ROW_FACTOR = 12.0
# Tiles, and rows of an output, deviate by their own norm by at most 7.4 times a tensor's error (float32) and 4.7 times
# (16 bits). The tolerance is 3 times that error: this factor allows 12. Tiles and rows of gradients that are not small
# deviate by 4.2.
PART_FACTOR = 4.0
SMALL_BY_WEIGHTS, SMALL_GRADIENT = 0.1, 0.25
# A row of zeros is off by 1 of its norm. Some means of equal weights are smaller than others.
LEAST_LOST, _SMALLEST_MEAN = 0.5, 0.3
# If a softcap's tanh is rounded to 16 bits, honest rows were off by up to 0.55.
_LEAST_LOST_CAPPED = 0.75
# If few rows of d_out are large, those of a part of the case may happen to round less than others.
_SLACK_OF_GRADIENTS = 1.5
# Unit roundoff of float32, in which every backend sums.
ROUNDOFF = 2.0**-24
# Scores of the part: 8,192 x 8,192 take 2 ms in float64 on an H200.
PART_SCORES = {"cuda": 1 << 26, "cpu": 1 << 18}
# With fewer queries, heads of hard values differ much.
_FEW_QUERIES = 64
# Numbers of the keys of these: 1 GiB in float32.
_MOST_NUMBERS = 1 << 28


def measured_tolerances(case: Case, inputs: Inputs, *, with_gradients: bool) -> dict[str, Tolerance]:
    """Return the bounds for `out`, and with gradients for `dq`, `dk` and `dv`."""
    part, on_part = part_of(case, inputs)
    exact = reference(part, on_part, with_gradients=with_gradients, precision=torch.float64)
    single = reference(part, on_part, with_gradients=with_gradients)
    rounded = eager(part, on_part, with_gradients=with_gradients)
    plain = {name: bounds(case, rounded[name], single[name], exact[name]) for name in exact}
    if inputs.kind != NORMAL and case.quantised:
        return plain
    if inputs.kind == NORMAL:
        return {name: _with_parts(case, name, one) for name, one in plain.items()}
    # On hard values fused kernels do not round less than the formula does, and rounding has parts of its own.
    otherwise = fused_formula(part, on_part, with_gradients=with_gradients)
    fused = {name: bounds(case, otherwise[name], single[name], exact[name]) for name in exact}
    least = FACTOR * score_rounding(part, on_part)
    few = part.batch * part.q_heads * part.q_len < FEW_ROWS
    slacks = {name: 2.0 if few else 1.0 if name == "out" else _SLACK_OF_GRADIENTS for name in exact}
    made = {}
    for name, slack in slacks.items():
        relative = slack * max(plain[name].relative, fused[name].relative, least)
        worst_row = slack * max(plain[name].worst_row, fused[name].worst_row)
        made[name] = Tolerance(relative, max(worst_row, WORST_ROW_FACTOR * relative))
    return made | {"out": _with_lost_rows(case, made["out"], (rounded["out"], otherwise["out"]), exact["out"])}


def _with_lost_rows(case: Case, whole: Tolerance, rounded: tuple[torch.Tensor, ...], exact: torch.Tensor) -> Tolerance:
    """Add a bound on rows by their own norm, which shows those that are zeros or have another winner.

    With equal weights a row is as small as the mean of all values, and no norm of the tensor shows it.
    """
    small = _SMALLEST_MEAN * case.kv_len**-0.5
    asked = replace(whole, own_row=math.inf, tile=math.inf, small=small)
    measured = [judged_error(one, exact, asked).own_row or 0.0 for one in rounded]
    least = LEAST_LOST if case.softcap is None or DTYPE_BYTES[case.dtype] > 2 else _LEAST_LOST_CAPPED
    allowed = max(least, FACTOR * max(measured))
    return replace(whole, own_row=allowed, tile=allowed, small=small)


def _with_parts(case: Case, name: str, whole: Tolerance) -> Tolerance:
    """Add bounds on rows and tiles by their own norm.

    dq and dk of a row are differences of what cancels, so that a row of small norm has the error of others. Codes have
    it most: the error of an output in codes is that of all its keys' gradients.
    """
    by_weights, several = name in ("out", "dv"), PART_FACTOR * whole.relative
    return replace(
        whole,
        own_row=several if by_weights else None,
        tile=several,
        small=SMALL_BY_WEIGHTS if by_weights else 1.0 if case.quantised else SMALL_GRADIENT,
    )


def bounds(case: Case, rounded: torch.Tensor, single: torch.Tensor, exact: torch.Tensor) -> Tolerance:
    """Return the bounds on a tensor by the formula's results in the case's dtype, in float32 and in float64.

    Raises ValueError if one of them is not finite.
    """
    eager, own = tensor_error(rounded, exact), tensor_error(single, exact)
    if eager.relative is None or eager.worst_row is None or own.relative is None or own.worst_row is None:
        raise ValueError("the formula's result is not finite, so it gives no tolerance")
    # Tensors of a few elements may come out exact by chance, but every result is rounded at least once. One unit of
    # e4m3 is an eighth, more than is measured, so the bound is half of it: the largest error of rounding once.
    unit = unit_of(case)
    # A few rows, as in decoding, may come out nearer than others by chance.
    factor = FACTOR * (1 + exact[..., 0].numel() ** -0.5)
    relative = max(factor * eager.relative + own.relative, unit / 2 if case.quantised else unit, summed_otherwise(case))
    return Tolerance(relative, max(FACTOR * eager.worst_row + own.worst_row, WORST_ROW_FACTOR * relative))


def summed_otherwise(case: Case) -> float:
    """Return the relative error that float32 sums of n terms may have by their order: sqrt(n) roundoffs.

    The formula's matrix products sum pairwise and are more accurate than that, and with a single query nothing averages
    out. Source of the bound: Higham and Mary, SIAM J. Sci. Comput. 41 (2019), A2815.
    """
    terms = case.head_dim + case.kv_len + case.q_len * (case.q_heads // case.kv_heads)
    return ROUNDOFF * float(terms**0.5)


def eager(case: Case, inputs: Inputs, *, with_gradients: bool) -> dict[str, torch.Tensor]:
    """Return `out`, and with gradients `dq`, `dk`, `dv`, of the plain formula in the case's own dtype."""
    if case.dtype == INT8:
        return {"out": int8_formula(case, inputs)}
    if case.in_codes:
        return fp8_formula(case, inputs, with_gradients=with_gradients)
    device = inputs.q_bhsd.device
    mask = hidden_keys(case, 0, case.q_len, device) if not case.dense else None
    bias = bias_tensor(case, device, inputs.q_bhsd.dtype)
    with torch.set_grad_enabled(with_gradients):
        out = formula(case, mask, *inputs.qkv, sinks_of(case, device), bias)
    tensors = {"out": out.detach()}
    if with_gradients:
        tensors |= dict(zip(("dq", "dk", "dv"), autograd_backward(inputs, out)(), strict=True))
    return tensors


def part_of(case: Case, inputs: Inputs) -> tuple[Case, Inputs]:
    """Return one row of the batch with as many heads as fit, and only the first tokens if one head does not fit.

    Heads of hard values differ if they have few queries: then all of them, and more rows of the batch, as far as fit.
    """
    scores = PART_SCORES[inputs.q_bhsd.device.type]
    if inputs.kind != NORMAL and case.q_len < _FEW_QUERIES:
        scores *= 16
        keys = _MOST_NUMBERS // (case.q_heads * case.kv_len * case.head_dim)
        batch = min(case.batch, keys, scores // (case.q_heads * case.q_len * case.kv_len))
        if batch:
            rows = inputs.mapped(lambda tensor: tensor.detach()[:batch].requires_grad_(tensor.requires_grad))
            return replace(case, batch=batch), replace(rows, sink=None)
    side = max(1, int(scores**0.5))
    q_len, kv_len = case.q_len, case.kv_len
    if q_len * kv_len > scores:
        q_len, kv_len = min(q_len, max(side, scores // kv_len)), min(kv_len, max(side, scores // q_len))
    lengths, kv_lengths = _first(case.lengths, q_len), None
    if case.lengths is not None and case.kv_lengths is not None:
        lengths, kv_lengths = _first_requests(case.lengths, case.kv_lengths, q_len, kv_len)
        q_len, kv_len = sum(lengths), sum(kv_lengths)
    heads = max(1, min(case.kv_heads, scores // (q_len * kv_len)))
    # One query head for each key-value head: a group's sum is rounded once more, never less.
    part = replace(
        case, batch=1, q_heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len, lengths=lengths, kv_lengths=kv_lengths
    )
    if part.keyless:
        part = replace(part, align="top_left", **NO_NUMBER)
    group = case.q_heads // case.kv_heads

    def cut(tensor: torch.Tensor, step: int, length: int) -> torch.Tensor:
        cut_out = tensor.detach()[:1, : heads * step : step, :length].contiguous()
        return cut_out.requires_grad_(tensor.requires_grad)

    return part, Inputs(
        cut(inputs.q_bhsd, group, q_len),
        cut(inputs.k_bhsd, 1, kv_len),
        cut(inputs.v_bhsd, 1, kv_len),
        cut(inputs.d_out_bhsd, group, q_len),
        inputs.scales,
        inputs.kind,
        latent=inputs.latent,
    )


def _first(lengths: tuple[int, ...] | None, tokens: int) -> tuple[int, ...] | None:
    """Return the packed sequences of the first `tokens` tokens, the last one truncated."""
    if lengths is None:
        return None
    kept, left = [], tokens
    for length in lengths:
        if left:
            kept.append(min(length, left))
            left -= kept[-1]
    return tuple(kept)


def _first_requests(
    lengths: tuple[int, ...], kv_lengths: tuple[int, ...], queries: int, keys: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return as many requests as have these queries and keys together, at least the first one, which is then cut."""
    first, *others = ((own, of) for own, of in zip(lengths, kv_lengths, strict=True) if own)
    kept = [(min(first[0], queries, keys), min(first[1], keys))]
    for request in others:
        if sum(own for own, _ in kept) + request[0] > queries or sum(own for _, own in kept) + request[1] > keys:
            break
        kept.append(request)
    return tuple(own for own, _ in kept), tuple(own for _, own in kept)
