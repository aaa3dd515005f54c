"""What libraries that want (batch, length, heads, dim) share: layouts, and masks in FlashAttention's words."""

from collections.abc import Callable

import torch

from attn_exp.attention.autograd import Attention
from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.case import Case

# From q, k and v, indexed (batch, length, heads, dim), to the output likewise.
BshdAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# The same of packed sequences, (tokens, heads, dim).
PackedAttention = BshdAttention


def flash_window(*, causal: bool, window: int | None) -> tuple[int, int]:
    """The keys that a query sees before and after its own, as FlashAttention counts them; -1 is without bound.

    Both bounds are inclusive and relative to the key that aligns bottom-right with the query
    (flash_attn/flash_attn_interface.py, flash_attn_func), so a window of keys kept, the query's own included, is one
    less to the left. FlashAttention 2, 3 and 4 and TransformerEngine count so.
    """
    return window - 1 if window is not None else -1, 0 if causal else -1


def sequence_starts(case: Case, device: torch.device) -> torch.Tensor | None:
    """Where each packed sequence starts, and the last one ends, as int32 (sequences + 1,); None if none are packed."""
    if case.lengths is None:
        return None
    ends = torch.tensor(case.lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0)).to(device)


def bshd_calls(attention: BshdAttention, inputs: Inputs, notes: dict[str, float] | None = None) -> Calls:
    """The calls of a function of BSHD tensors. The conversion is not timed, transposed views cost nothing."""
    return calls_of(transposed(attention), inputs.laid_out("bshd"), notes=notes)


def transposed(attention: BshdAttention) -> Attention:
    """A function of BSHD tensors as one of BHSD tensors."""

    def of_bhsd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return of_bhsd


def unbatched(attention: PackedAttention) -> BshdAttention:
    """A function of packed tensors (tokens, heads, dim) as one of a batch of 1."""

    def of_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q[0], k[0], v[0]).unsqueeze(0)

    return of_bshd
