"""The formula rounded as fused kernels round it: scores and sums in float32, p and ds in the case's dtype.

It is never timed. On hard values (attn_exp/attention/hard_values.py) fused kernels round in other places than the plain
formula. Their backward recomputes p from a float32 log-sum-exp, whose rounding grows with the scores. It takes sum(p
dp) of a row from the rounded output (FlashAttention-2, arXiv:2307.08691, algorithm 2).

Quantised attention has formulas of its own: for fp8 codes with scales, and for int8 codes made inside of the call.
"""

import torch

from attn_exp.attention.inputs import E4M3_MAX, Inputs, rounded
from attn_exp.attention.reference import masked_scores
from attn_exp.attention.scores import sinks_of
from attn_exp.core.case.case import Case

# So few rows of q and d_out are no statistics of rounding.
FEW_ROWS = 256
_P_SCALE = 1 / E4M3_MAX
_LARGEST_CODE = 127.0
_QUERIES, _KEYS = 128, 64


@torch.no_grad()
def fused_formula(case: Case, inputs: Inputs, *, with_gradients: bool) -> dict[str, torch.Tensor]:
    """Return `out`, and with gradients `dq`, `dk`, `dv`, in the inputs' dtype."""
    group, scale = case.q_heads // case.kv_heads, case.head_dim**-0.5
    q, d_out = inputs.q_bhsd.detach(), inputs.d_out_bhsd
    k, v = (tensor.detach().repeat_interleave(group, dim=1) for tensor in (inputs.k_bhsd, inputs.v_bhsd))
    dtype = q.dtype
    scores, _ = _scores(case, q, k, in_parts=False)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - largest)
    sums = weights.sum(-1, keepdim=True)
    sinks = sinks_of(case, q.device)
    if sinks is not None:
        sums = sums + torch.exp(sinks.float() - largest)
    out = ((weights.to(dtype).float() @ v.float()) / sums).to(dtype)
    if not with_gradients:
        return {"out": out}
    again, slope = _scores(case, q, k, in_parts=True)
    p = torch.exp(again - (largest + sums.log()))
    dp = d_out.float() @ v.float().mT
    terms = d_out.float() * out.float()
    delta = terms.sum(-1, keepdim=True)
    if delta.numel() < FEW_ROWS:
        # None of few rows may happen to have more than a lucky rounding: take its largest, all terms alike.
        delta += torch.finfo(dtype).eps / 2 * terms.norm(dim=-1, keepdim=True)
    ds = p * (dp - delta)
    ds = (ds if slope is None else ds * slope).to(dtype).float()
    dq, dk = ds @ k.float() * scale, ds.mT @ q.float() * scale
    dv = p.to(dtype).float().mT @ d_out.float()
    dk, dv = (tensor.unflatten(1, (case.kv_heads, group)).sum(2) for tensor in (dk, dv))
    return {"out": out, "dq": dq.to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}


@torch.no_grad()
def score_rounding(case: Case, inputs: Inputs) -> float:
    """Return the error of the largest scores as float32 sums: a weight of another kernel deviates by this share.

    The sum of n terms of random signs errs by sqrt(n) roundoffs of their magnitudes' sum (Higham and Mary, SIAM J. Sci.
    Comput. 41 (2019), A2815).
    """
    group = case.q_heads // case.kv_heads
    q, k = inputs.q_bhsd.float().abs(), inputs.k_bhsd.float().abs().repeat_interleave(group, dim=1)
    # The scale of scores is 1 / sqrt(head_dim).
    return 2.0**-24 * float((q @ k.mT).amax())


def _scores(
    case: Case, q: torch.Tensor, k: torch.Tensor, *, in_parts: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return masked scores in float32, and the softcap's slope.

    A backward sums in another order than its forward, here in two halves of the channels. Large scores then differ
    between them by their own rounding.
    """
    q, k, scale = q.float(), k.float(), case.head_dim**-0.5
    if in_parts:
        scores = (q[..., ::2] * scale) @ k[..., ::2].mT + (q[..., 1::2] * scale) @ k[..., 1::2].mT
    else:
        scores = q @ k.mT * scale
    return masked_scores(case, scores)


@torch.no_grad()
def fp8_formula(case: Case, inputs: Inputs, *, with_gradients: bool) -> dict[str, torch.Tensor]:
    """Return `out`, and with gradients `dq`, `dk`, `dv`, in float32, for inputs in codes.

    Values are rounded to e4m3 wherever a fused kernel passes codes on: p before its product with v, the output, and in
    the backward p and ds before their products, and the gradients. Scores and sums stay float32, as the matrix units
    return them. Since p is at most 1, its scale is known; ds and the results get a scale of their own amax / 448. It is
    never timed: the tolerances at fp8 are measured with it.
    """
    numbers = inputs.numbers()
    group = case.q_heads // case.kv_heads
    q, d_out = numbers.q_bhsd, numbers.d_out_bhsd
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (numbers.k_bhsd, numbers.v_bhsd))
    scores = q @ k.mT * case.head_dim**-0.5
    scores, slope = masked_scores(case, scores)
    # Relative to the row's largest, as in an online softmax, and divided by the sum at the end.
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    sums = weights.sum(-1, keepdim=True)
    out = rounded(rounded(weights, _P_SCALE) @ v / sums)
    if not with_gradients:
        return {"out": out}
    p = weights / sums
    ds = p * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True))
    ds = rounded(ds if slope is None else ds * slope)
    scale = case.head_dim**-0.5
    dq, dk, dv = ds @ k * scale, ds.mT @ q * scale, rounded(p, _P_SCALE).mT @ d_out
    dk, dv = (tensor.unflatten(1, (case.kv_heads, group)).sum(2) for tensor in (dk, dv))
    return {"out": out, "dq": rounded(dq), "dk": rounded(dk), "dv": rounded(dv)}


@torch.no_grad()
def int8_formula(case: Case, inputs: Inputs) -> torch.Tensor:
    """Return the output (batch, q_heads, q_len, value_dim) in float16. There is no backward.

    Keys lose their mean over all tokens, which changes no weight and removes their common part. Then each 128 queries
    and each 64 keys of a head get a scale, their largest magnitude divided by 127 (SageAttention: arXiv:2410.02367, 4.2
    and 4.3). Both p and v are float16. It is never timed: the tolerances at int8 are measured with it.
    """
    group = case.q_heads // case.kv_heads
    k, v = inputs.k_bhsd.detach(), inputs.v_bhsd.detach()
    k = rounded_by_block(k - k.mean(-2, keepdim=True), _KEYS).repeat_interleave(group, dim=1)
    scores = rounded_by_block(inputs.q_bhsd.detach(), _QUERIES) @ k.mT * case.head_dim**-0.5
    scores, _ = masked_scores(case, scores)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = weights.half().float() @ v.float().repeat_interleave(group, dim=1)
    return (out / weights.sum(-1, keepdim=True)).half()


def rounded_by_block(tensor_bhsd: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return numbers after quantising them to int8 and back, in float32, with a scale for so many tokens of a head."""

    def rounded(block: torch.Tensor) -> torch.Tensor:
        scale = block.abs().amax((-2, -1), keepdim=True) / _LARGEST_CODE
        # Any scale fits a block of zeros.
        return torch.round(block / scale.masked_fill(scale == 0, 1.0)) * scale

    return torch.cat([rounded(block) for block in tensor_bhsd.float().split(tokens, dim=-2)], dim=-2)
