"""The formula at fp8: computed in float32, and rounded to e4m3 wherever a fused kernel passes codes on.

These are p before its product with v, the output, and in the backward p and ds before their products, and the
gradients. Scores and sums stay float32, as the matrix units return them. p is at most 1, so its scale is known; ds and
the results get a scale of their own amax / 448. It is never timed: the tolerances at fp8 are measured with it.
"""

import torch

from attn_exp.attention.biases import bias_tensor
from attn_exp.attention.formula import hidden_keys, masked
from attn_exp.attention.inputs import E4M3_MAX, Inputs, rounded
from attn_exp.attention.reference import capped
from attn_exp.core.case import Case

_P_SCALE = 1 / E4M3_MAX


@torch.no_grad()
def fp8_formula(case: Case, inputs: Inputs, *, with_gradients: bool) -> dict[str, torch.Tensor]:
    """Return `out`, and with gradients `dq`, `dk`, `dv`, in float32, for inputs in codes."""
    numbers = inputs.numbers()
    group = case.q_heads // case.kv_heads
    q, d_out = numbers.q_bhsd, numbers.d_out_bhsd
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (numbers.k_bhsd, numbers.v_bhsd))
    scores = q @ k.mT * case.head_dim**-0.5
    scores, slope = capped(case, scores)
    bias = bias_tensor(case, scores.device, scores.dtype)
    scores = scores if bias is None else scores + bias
    if masked(case):
        scores = scores.masked_fill(hidden_keys(case, 0, case.q_len, scores.device), float("-inf"))
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
