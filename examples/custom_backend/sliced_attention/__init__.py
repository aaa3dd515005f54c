"""A backend of attn_exp in a package of its own: queries in slices, each with only the keys that it may see."""

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of
from attn_exp.backends.supports import Supports
from attn_exp.core.case import Case


class SlicedAttention(DeclarativeBackend):
    """PyTorch's SDPA over slices of queries: under a causal mask keys of the future are never read."""

    # What is not in here is refused, in a sentence, before anything is measured.
    supports = Supports(devices=("cuda", "cpu"), dtypes=("bfloat16", "float16", "float32"), value_dims="any")
    # What the profiler has to see, else the job is `wrong_kernel`; on a CPU names of operators.
    claims = {("cpu", "forward"): "scaled_dot_product"}

    def __init__(self, name: str, rows: int = 32) -> None:
        super().__init__(name)
        self.rows = rows

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the masks: not timed. What `calls_of` gets is timed, forward and, by autograd, backward."""
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
    """Attention of each slice of queries to the keys before `seen`, put together again: (batch, heads, q_len, dim)."""
    parts = [
        sdpa(q_bhsd[:, :, start:end], k_bhsd[:, :, :seen], v_bhsd[:, :, :seen], attn_mask=mask, enable_gqa=grouped)
        for start, end, seen, mask in slices
    ]
    return torch.cat(parts, dim=2)
