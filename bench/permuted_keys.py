"""Hand-written attention that permutes k at once, compiled: pytorch#195320 as a user's backend.

PYTHONPATH=bench attn-exp hunt backend._target_=permuted_keys.PermutedKeys
"""

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of
from attn_exp.backends.compile import with_own_code
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of q, k and v (batch, heads, tokens, dim)."""
    tokens_first = k.transpose(1, 2).contiguous()
    scores = torch.matmul(q, tokens_first.permute(0, 2, 3, 1)) * q.shape[-1] ** -0.5
    return torch.matmul(scores.softmax(-1), v)


class PermutedKeys(DeclarativeBackend):
    """`attention` through torch.compile."""

    supports = Supports(devices=("cuda", "cpu"), dtypes=("float32",), passes=("forward",), grouped=False)

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the compiled call."""
        return calls_of(torch.compile(with_own_code(attention), dynamic=False), inputs)
