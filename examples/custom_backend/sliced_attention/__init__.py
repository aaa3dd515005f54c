"""A backend in a package of its own: queries in slices, each with only the keys that they may see."""

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case


class SlicedAttention(DeclarativeBackend):
    """PyTorch's SDPA over slices of queries, so that a causal mask never reads future keys."""

    # What is not listed here is refused before anything is measured.
    supports = Supports(devices=("cuda", "cpu"), dtypes=("bfloat16", "float16", "float32"), value_dims="any")
    # The profiler must see this kernel, or the job is `wrong_kernel`; on a CPU it is an operator's name.
    claims = {("cpu", "forward"): "scaled_dot_product"}

    def __init__(self, name: str, rows: int = 32) -> None:
        super().__init__(name)
        self.rows = rows

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the masks, which is not timed, and return the calls: forward, and backward by autograd."""
        slices = []
        for start in range(0, case.q_len, self.rows):
            end = min(start + self.rows, case.q_len)
            seen = min(case.kv_len, end + case.offset) if case.causal else case.kv_len
            mask = None
            if case.causal:
                ones = torch.ones(end - start, seen, dtype=torch.bool, device=inputs.q_bhsd.device)
                mask = ones.tril(start + case.offset)
            slices.append((start, end, seen, mask))
        return calls_of(partial(sliced, slices, case.q_heads != case.kv_heads), inputs)


def sliced(
    slices: list[tuple[int, int, int, torch.Tensor | None]],
    grouped: bool,
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of each slice to the keys before `seen`, concatenated: (batch, heads, q_len, dim)."""
    parts = [
        sdpa(q_bhsd[:, :, start:end], k_bhsd[:, :, :seen], v_bhsd[:, :, :seen], attn_mask=mask, enable_gqa=grouped)
        for start, end, seen, mask in slices
    ]
    return torch.cat(parts, dim=2)
