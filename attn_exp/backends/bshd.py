"""Layouts and masks for libraries with tensors (batch, length, heads, dim)."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from attn_exp.attention.autograd import Attention
from attn_exp.attention.inputs import Inputs, paged
from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.case.case import Case

# Maps q, k and v of shape (batch, length, heads, dim) to an output of the same layout.
BshdAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# The same for packed sequences of shape (tokens, heads, dim).
PackedAttention = BshdAttention


def flash_window(*, causal: bool, window: int | None) -> tuple[int, int]:
    """Return the window (left, right) in FlashAttention's convention.

    The bounds count the visible keys before and after the key that aligns bottom-right with the query, inclusive; -1 is
    unbounded (flash_attn/flash_attn_interface.py, flash_attn_func). A case's window counts the query's own key, so the
    left bound is one less. FlashAttention 2, 3 and 4 and TransformerEngine share this convention.
    """
    return window - 1 if window is not None else -1, 0 if causal else -1


def sequence_starts(case: Case, device: torch.device) -> torch.Tensor | None:
    """Return the cumulative starts of packed sequences, int32 (sequences + 1,); None if the case is not packed."""
    return None if case.lengths is None else starts_of(case.lengths, device)


def starts_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return where sequences behind each other start, and the last one's end, int32 (sequences + 1,)."""
    ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0)).to(device)


def bshd_calls(
    attention: BshdAttention,
    inputs: Inputs,
    notes: dict[str, float] | None = None,
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Calls:
    """Return the calls of a function of BSHD tensors.

    The layout conversion is not timed; transposed views cost nothing.
    """
    return calls_of(transposed(attention), inputs.laid_out("bshd"), scope, notes)


def transposed(attention: BshdAttention) -> Attention:
    """Wrap a function of BSHD tensors as a function of BHSD tensors."""

    def of_bhsd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return of_bhsd


def paged_calls(attention: BshdAttention, case: Case, inputs: Inputs, notes: dict[str, float] | None = None) -> Calls:
    """Return the calls of a function of BSHD queries and of pools (pages, page_size, kv_heads, dim)."""

    def of_bhsd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q.transpose(1, 2), k, v).transpose(1, 2)

    in_pages = inputs if inputs.paging is not None else paged(case, inputs)
    return calls_of(of_bhsd, in_pages.laid_out("bshd"), notes=notes)


def unbatched(attention: PackedAttention) -> BshdAttention:
    """Wrap a function of packed tensors (tokens, heads, dim) as a function of tensors with a batch."""

    def of_bshd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (len(q), -1))
        return out

    return of_bshd
