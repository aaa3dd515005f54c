"""The formula at int8: scores from codes with a scale for each block, as SageAttention computes them.

Keys lose their mean over all tokens, which changes no weight and takes away what all keys share; then 128 queries and
64 keys of a head get a scale each, their largest magnitude divided by 127 (arXiv:2410.02367, 4.2 and 4.3). p and v are
float16. It is never timed: the tolerances at int8 are measured with it.
"""

import torch

from attn_exp.attention.biases import bias_tensor
from attn_exp.attention.formula import hidden_keys, masked
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import capped
from attn_exp.core.case import Case

_LARGEST_CODE = 127.0
_QUERIES, _KEYS = 128, 64


@torch.no_grad()
def int8_formula(case: Case, inputs: Inputs) -> torch.Tensor:
    """Return the output (batch, q_heads, q_len, value_dim) in float16. There is no backward."""
    group = case.q_heads // case.kv_heads
    k, v = inputs.k_bhsd.detach(), inputs.v_bhsd.detach()
    k = rounded_by_block(k - k.mean(-2, keepdim=True), _KEYS).repeat_interleave(group, dim=1)
    scores = rounded_by_block(inputs.q_bhsd.detach(), _QUERIES) @ k.mT * case.head_dim**-0.5
    scores, _ = capped(case, scores)
    bias = bias_tensor(case, scores.device, scores.dtype)
    scores = scores if bias is None else scores + bias
    if masked(case):
        scores = scores.masked_fill(hidden_keys(case, 0, case.q_len, scores.device), float("-inf"))
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
