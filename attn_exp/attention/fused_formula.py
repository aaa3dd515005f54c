"""The formula rounded as fused kernels round it: scores and sums in float32, p and ds in the case's dtype.

It is never timed. On hard values (attn_exp/attention/hard_values.py) the plain formula alone is no measure of what
fused kernels round: their backward recomputes p from a float32 log-sum-exp, whose rounding grows with the scores, and
takes sum(p dp) of a row from the output as it was rounded (FlashAttention-2, arXiv:2307.08691, algorithm 2).
"""

import torch

from attn_exp.attention.formula import hidden_keys, masked
from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case


@torch.no_grad()
def fused_formula(case: Case, inputs: Inputs, *, with_gradients: bool) -> dict[str, torch.Tensor]:
    """Return `out`, and with gradients `dq`, `dk`, `dv`, in the inputs' dtype."""
    group, scale = case.q_heads // case.kv_heads, case.head_dim**-0.5
    q, d_out = inputs.q_bhsd.detach(), inputs.d_out_bhsd
    k, v = (tensor.detach().repeat_interleave(group, dim=1) for tensor in (inputs.k_bhsd, inputs.v_bhsd))
    dtype = q.dtype
    scores, slope = q.float() @ k.float().mT * scale, None
    if case.softcap is not None:
        bent = torch.tanh(scores / case.softcap)
        scores, slope = case.softcap * bent, 1 - bent * bent
    if masked(case):
        scores = scores.masked_fill(hidden_keys(case, 0, case.q_len, scores.device), float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - largest)
    sums = weights.sum(-1, keepdim=True)
    out = ((weights.to(dtype).float() @ v.float()) / sums).to(dtype)
    if not with_gradients:
        return {"out": out}
    p = torch.exp(scores - (largest + sums.log()))
    dp = d_out.float() @ v.float().mT
    ds = p * (dp - (d_out.float() * out.float()).sum(-1, keepdim=True))
    ds = (ds if slope is None else ds * slope).to(dtype).float()
    dq, dk = ds @ k.float() * scale, ds.mT @ q.float() * scale
    dv = p.to(dtype).float().mT @ d_out.float()
    dk, dv = (tensor.unflatten(1, (case.kv_heads, group)).sum(2) for tensor in (dk, dv))
    return {"out": out, "dq": dq.to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}
