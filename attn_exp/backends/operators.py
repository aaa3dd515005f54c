"""Wrap a library's attention as a torch custom operator, which `torch.compile` keeps as one node of its graph.

A library gets two operators, `attn_exp::NAME_attention` and its backward. They take plain arguments and pass the masks
on as `AttentionOptions`. The library is imported when an operator is called: registration, the shapes for tracing and
the autograd formula need no library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attn_exp.attention.inputs import Inputs, Scales
from attn_exp.backends.bshd import BshdAttention, sequence_starts
from attn_exp.core.case.case import Case


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
# Maps d_out, q, k, v, the output and the log-sum-exp to dq, dk and dv.
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


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
