"""The formula rounded as fused kernels round it: scores and sums in float32, p and ds in the case's dtype.

It is never timed. On hard values (attn_exp/attention/hard_values.py) fused kernels round in other places than the plain
formula. Their backward recomputes p from a float32 log-sum-exp, whose rounding grows with the scores. It takes sum(p
dp) of a row from the rounded output (FlashAttention-2, arXiv:2307.08691, algorithm 2).
"""

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import masked_scores
from attn_exp.attention.sinks import sinks_of
from attn_exp.core.case.case import Case

# So few rows of q and d_out are no statistics of rounding.
FEW_ROWS = 256


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
