"""Judge and time a function of one's own from Python, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from attn_exp.api.timed import Timed


def time(
    function: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    align: str = "top_left",
    scale: float | None = None,
    reference: Callable[..., torch.Tensor] | None = None,
    passes: Sequence[str] | None = None,
    name: str | None = None,
    sweep: str | None = None,
    folder: str | Path = "multirun",
    **choices: Any,
) -> Timed:
    """Judge and time `function(q, k, v)` with the method of `attn-exp run`, in this process.

    The results of its first call, of timed calls and of calls on other values are compared with float32
    (`docs/checks.md`). The time is that of `docs/measuring.md`. The function gets copies of the tensors with their
    strides, in which signs change between timed calls; the tensors themselves are only read. Without `reference=` it is
    also called on random values.

    Args:
        function: takes q, k and v, and returns a tensor (batch, q_heads, q_len, value_dim) of their dtype. Give other
            arguments by a `lambda` or `functools.partial`.
        q: (batch, q_heads, q_len, head_dim), in bfloat16, float16 or float32, on a CPU or a GPU.
        k: (batch, kv_heads, kv_len, head_dim); `kv_heads` divides `q_heads`.
        v: (batch, kv_heads, kv_len, value_dim).
        causal: whether a query sees only keys up to its own.
        align: the alignment of a causal mask if q_len is not kv_len: `top_left`, as `is_causal` of PyTorch's
            `scaled_dot_product_attention`, or `bottom_right`, as FlashAttention.
        scale: the factor of the scores, 1 / sqrt(head_dim) by default.
        reference: the right function, if it is not attention: a function of q, k and v that computes in their dtype. It
            is called in the tensors' own dtype, in float32 and in float64, and must do the same in all. TFLOPS are
            unknown then.
        passes: some of `forward`, `backward` and `step` (both in one call). By default only the forward, and with the
            backward if one of the tensors requires gradients. Autograd computes the backward, of all three.
        name: its name in the record; by default the function's own.
        sweep: keep the record in the sweep of that name, for `attn_exp.compare` and `attn-exp compare`. Functions that
            were timed into one sweep are compared with each other.
        folder: the folder of the sweeps' folders.
        **choices: how to measure, as for `attn_exp.run`: `stopping="quick"`, `timer="event"`, `l2="written"`,
            `regime="burst"`, `compile="default"` (torch.compile around the function), `seed=1`.

    Returns:
        The findings: `.status` is `ok` if the results are right, else `.reason` says why not; `.time_us()` is the
        median in microseconds. A function that raises, or is wrong, gives a status and no exception.

    Raises:
        UserError: the tensors are not those of an attention, a choice does not exist, or the reference raises.
    """
    from attn_exp.api.timed import Asked, measured

    asked = Asked(causal=causal, align=align, scale=scale, reference=reference, passes=passes, choices=choices)
    return measured(function, (q, k, v), asked, name=name, sweep=sweep, folder=folder)
