"""Layouts and masks for libraries with tensors (batch, length, heads, dim), and their attention as custom operators.

`torch.compile` keeps a custom operator as one node of its graph. A library gets two, `attn_exp::NAME_attention` and its
backward. They take plain arguments and pass the masks on as `AttentionOptions`. The library is imported when an
operator is called: registration, the shapes for tracing and the autograd formula need no library.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attn_exp.attention.inputs import Attention, Inputs, Scales, paged
from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.case.case import Case

# Maps q, k and v of shape (batch, length, heads, dim) to an output of the same layout.
BshdAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# The same for packed sequences of shape (tokens, heads, dim).
PackedAttention = BshdAttention
# Maps d_out, q, k, v, the output and the log-sum-exp to dq, dk and dv.
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


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


@dataclass(frozen=True)
class AttentionOptions:
    """Options of an operator besides its tensors, in terms of `Case`'s fields.

    Attributes:
        starts: the first row of each packed sequence, int32 (sequences + 1,), or None.
        descales: float32 (3, batch, kv_heads) that q, k and v are multiplied by if they are codes. The batch of a
            packed case is its sequences.
    """

    starts: torch.Tensor | None
    lengths: tuple[int, ...]
    causal: bool
    window: int | None
    softcap: float | None
    deterministic: bool
    descales: torch.Tensor | None = None


# Maps q, k, v (batch, length, heads, dim) to the output in the same layout and the log-sum-exp (batch, heads, length)
# in float32.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions], tuple[torch.Tensor, torch.Tensor]]


def register(name: str, forward: Forward, backward: Backward) -> Any:
    """Register `attn_exp::NAME_attention` and `attn_exp::NAME_attention_backward`, and return the first.

    The log-sum-exp is only for the backward: no gradient flows through it.
    """

    @torch.library.custom_op(f"attn_exp::{name}_attention", mutates_args=())
    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor | None,
        lengths: Sequence[int],
        causal: bool,
        window: int | None,
        softcap: float | None,
        deterministic: bool,
        descales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return forward(
            q, k, v, AttentionOptions(starts, tuple(lengths), causal, window, softcap, deterministic, descales)
        )

    @torch.library.custom_op(f"attn_exp::{name}_attention_backward", mutates_args=())
    def attention_backward(
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        starts: torch.Tensor | None,
        lengths: Sequence[int],
        causal: bool,
        window: int | None,
        softcap: float | None,
        deterministic: bool,
        descales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        options = AttentionOptions(starts, tuple(lengths), causal, window, softcap, deterministic, descales)
        return backward(d_out, q, k, v, out, lse, options)

    attention.register_fake(_fake_attention)
    attention_backward.register_fake(_fake_backward)
    attention.register_autograd(partial(_differentiate, attention_backward), setup_context=_save)
    return getattr(torch.ops.attn_exp, f"{name}_attention").default


def operator_attention(operator: Any, case: Case, inputs: Inputs, *, deterministic: bool = False) -> BshdAttention:
    """Return an operator as the attention of a case."""
    device = inputs.q_bhsd.device
    starts, descales = sequence_starts(case, device), _descales(case, inputs.scales, device)
    lengths = list(case.lengths or ())

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs: tuple[torch.Tensor, torch.Tensor] = operator(
            q, k, v, starts, lengths, case.causal, case.window, case.softcap, deterministic, descales
        )
        return outputs[0]

    return attention


def _descales(case: Case, scales: Scales | None, device: torch.device) -> torch.Tensor | None:
    if scales is None:
        return None
    batch = case.batch if case.lengths is None else len(case.lengths)
    factors = torch.tensor([scales.q, scales.k, scales.v], device=device)
    return factors[:, None, None].repeat(1, batch, case.kv_heads)


def _fake_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, heads, _dim = q.shape
    # Libraries that take fp8 codes return bfloat16.
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = q.new_empty(batch, length, heads, v.shape[-1], dtype=dtype)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


def _fake_backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, starts, *ctx.asked = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _differentiate(backward: Any, ctx: Any, d_out: torch.Tensor, _d_lse: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, starts = ctx.saved_tensors
    return (*backward(d_out, q, k, v, out, lse, starts, *ctx.asked), None, *(None for _ in ctx.asked))
