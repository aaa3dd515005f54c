"""Fused attention in Triton, forward and backward, as operators for autograd and `torch.compile`.

The kernels are in `forward_kernel` and `backward_kernels`, their arguments in `launch`.
"""

from typing import Any

import torch

from attn_exp.kernels.added import LOG2_E, Added
from attn_exp.kernels.bounds import Bounds
from attn_exp.kernels.launch import Scores, launch_dkdv, launch_dq, launch_forward, launch_rows

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_DIM = 256
# Positions and their differences are 32-bit in the kernels.
_LARGEST_POSITION = 1 << 29
# The arguments of the operators that are tensors: q, k, v and sinks, what is added, and bounds.
_TENSORS = 9


def attention(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    bounds: Bounds | None = None,
    sinks: torch.Tensor | None = None,
    added: Added | None = None,
) -> torch.Tensor:
    """Compute softmax(scores) v with scores = scale * q kT, differentiable in q, k, v and the sinks.

    A query that sees no key gets zeros and has no gradient. Results and gradients are bitwise reproducible.

    Args:
        q_bhsd: (batch, q_heads, q_len, head_dim). Here and below the last stride must be 1.
        k_bhsd: (batch, kv_heads, kv_len, head_dim); kv_heads divides q_heads, adjacent query heads share keys.
        v_bhsd: (batch, kv_heads, kv_len, value_dim).
        scale: factor of the scores; None is head_dim ** -0.5.
        causal: query i sees only keys j <= i + offset.
        offset: the last key that query 0 sees. None is kv_len - q_len: the last query sees every key (bottom-right). 0
            is the top-left alignment.
        window: the number of keys kept, i + offset - window < j; it needs a causal mask.
        softcap: scores = softcap * tanh(scores / softcap), before the mask.
        bounds: another mask in place of the causal one (attn_exp/kernels/bounds.py).
        sinks: a logit of each query head, (1, q_heads, 1, 1), that joins the softmax's denominator.
        added: what is added to scores after the softcap (attn_exp/kernels/added.py); it has no gradient.

    Returns:
        (batch, q_heads, q_len, value_dim), with q's memory layout if their dimensions are equal.

    Raises:
        ValueError: shapes, dtypes, strides or options do not fit together.
    """
    _check(q_bhsd, k_bhsd, v_bhsd)
    head_dim, q_len, kv_len = q_bhsd.shape[3], q_bhsd.shape[2], k_bhsd.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    offset = kv_len - q_len if offset is None else offset
    if scale <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"scale={scale} and softcap={softcap} must be positive")
    if window is not None and not causal:
        raise ValueError("a window slides along a causal mask: set causal=True")
    if bounds is not None and causal:
        raise ValueError("bounds are the whole mask: leave causal out")
    if bounds is not None and (bounds.keys.shape[1] < q_len or bounds.queries.shape[1] < kv_len):
        raise ValueError(f"bounds of other lengths than {q_len} queries and {kv_len} keys")
    if window is not None and window < 1:
        raise ValueError(f"window={window} is not a positive number of keys")
    if sinks is not None and sinks.shape != (1, q_bhsd.shape[1], 1, 1):
        raise ValueError(f"sinks of the shape {tuple(sinks.shape)}, not {(1, q_bhsd.shape[1], 1, 1)}")
    added = Added() if added is None else added
    _check_added(added, q_bhsd, kv_len)
    if abs(offset) > _LARGEST_POSITION:
        raise ValueError(f"offset={offset} is beyond +-{_LARGEST_POSITION}")
    if window is not None:
        window = min(window, _LARGEST_POSITION)
    mask = (None, None, 0) if bounds is None else (bounds.keys, bounds.queries, bounds.pairs)
    numbers = (added.slopes_log2, added.own_keys, added.bias)
    out: torch.Tensor = _forward(
        q_bhsd, k_bhsd, v_bhsd, sinks, *numbers, *mask, scale, causal, offset, window, softcap
    )[0]
    return out


@torch.library.custom_op("attn_exp::triton_attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes_log2: torch.Tensor | None,
    own_keys: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_bounds: torch.Tensor | None,
    query_bounds: torch.Tensor | None,
    pairs: int,
    scale: float,
    causal: bool,
    offset: int,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse_log2 = _outputs(q, v)
    bounds = _bounds(key_bounds, query_bounds, pairs)
    added = Added(slopes_log2, own_keys, bias)
    scores = Scores(
        scale=scale, causal=causal, offset=offset, window=window, softcap=softcap, bounds=bounds, added=added
    )
    with torch.cuda.device_of(q):
        launch_forward(q, k, v, out, lse_log2, scores, sinks_log2=_log2(sinks))
    return out, lse_log2


@_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask_and_options: torch.Tensor | float | bool | int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q, v)


@torch.library.custom_op("attn_exp::triton_attention_backward", mutates_args=())
def _backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse_log2: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes_log2: torch.Tensor | None,
    own_keys: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_bounds: torch.Tensor | None,
    query_bounds: torch.Tensor | None,
    pairs: int,
    scale: float,
    causal: bool,
    offset: int,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if d_out.stride(-1) != 1 or 0 in d_out.stride():
        # For example a gradient that was expanded from one number.
        d_out = d_out.contiguous()
    dq, dk, dv = (_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v))
    bounds = _bounds(key_bounds, query_bounds, pairs)
    added = Added(slopes_log2, own_keys, bias)
    scores = Scores(
        scale=scale, causal=causal, offset=offset, window=window, softcap=softcap, bounds=bounds, added=added
    )
    with torch.cuda.device_of(q):
        padded_lse, delta = launch_rows(out, d_out, lse_log2)
        launch_dkdv(q, k, v, d_out, padded_lse, delta, dk, dv, scores)
        launch_dq(q, k, v, d_out, padded_lse, delta, dq, scores)
        d_sinks = _d_sinks(q, sinks, padded_lse, delta)
    return dq, dk, dv, d_sinks


@_backward.register_fake
def _(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse_log2: torch.Tensor,
    sinks: torch.Tensor | None,
    *mask_and_options: torch.Tensor | float | bool | int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (_empty(tensor, tensor.shape[-1]) for tensor in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *tensors = inputs[:_TENSORS]
    out, lse_log2 = output
    ctx.mark_non_differentiable(lse_log2)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse_log2, *tensors)
    ctx.options = inputs[_TENSORS:]


def _differentiate(ctx: Any, d_out: torch.Tensor | None, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if d_out is None:
        return (None,) * (_TENSORS + len(ctx.options))
    *gradients, d_sinks = _backward(d_out, *ctx.saved_tensors, *ctx.options)
    d_sinks = d_sinks if ctx.needs_input_grad[3] else None
    return (*gradients, d_sinks, *(None,) * (_TENSORS - 4 + len(ctx.options)))


_forward.register_autograd(_differentiate, setup_context=_save)


def _bounds(keys: torch.Tensor | None, queries: torch.Tensor | None, pairs: int) -> Bounds | None:
    return None if keys is None or queries is None else Bounds(keys, queries, pairs)


def _log2(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return sinks as logits of base 2, (q_heads) in float32."""
    return None if sinks is None else sinks.detach().flatten().float() * LOG2_E


def _d_sinks(
    q: torch.Tensor, sinks: torch.Tensor | None, padded_lse: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sinks, empty without them: that of a key's score whose value is zeros.

    Rows beyond the queries have lse inf and add nothing.
    """
    logits = _log2(sinks)
    if sinks is None or logits is None:
        return q.new_empty(0)
    gradients = torch.exp2(logits[None, :, None] - padded_lse).mul_(delta).sum((0, 2)).neg_()
    return gradients.reshape(sinks.shape).to(sinks.dtype)


def _outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse_log2 = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return _empty(q, v.shape[-1]), lse_log2


def _empty(like: torch.Tensor, dim: int) -> torch.Tensor:
    """Return an empty tensor with the same heads and rows, `dim` wide, in the same memory order of heads and rows."""
    batch, heads, length, _ = like.shape
    if like.stride(1) < like.stride(2):
        return torch.empty(batch, length, heads, dim, dtype=like.dtype, device=like.device).transpose(1, 2)
    return torch.empty(batch, heads, length, dim, dtype=like.dtype, device=like.device)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError("q, k and v must have the four dimensions (batch, heads, length, dim)")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"empty tensors: {shapes}")
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"batches, key-value heads, lengths or head dims differ: {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"key-value heads must divide query heads: {shapes}")
    if max(q.shape[3], v.shape[3]) > LARGEST_DIM:
        raise ValueError(f"head dims up to {LARGEST_DIM} only: {shapes}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(f"one dtype of float16, bfloat16 and float32, not {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        raise ValueError("the last dimension of q, k and v must be contiguous: call .contiguous() first")


def _check_added(added: Added, q: torch.Tensor, kv_len: int) -> None:
    _, heads, q_len, _ = q.shape
    slopes, own, bias = added.slopes_log2, added.own_keys, added.bias
    if slopes is not None and (own is None or len(own) < q_len or slopes.shape != (heads,)):
        raise ValueError(f"slopes of another shape than ({heads},), or own keys of fewer than {q_len} queries")
    if bias is not None and bias.shape not in ((1, heads, q_len, kv_len), (1, 1, q_len, kv_len)):
        raise ValueError(f"a bias of the shape {tuple(bias.shape)}, not (1, {heads} or 1, {q_len}, {kv_len})")
    if bias is not None and bias.stride(3) != 1:
        raise ValueError("the last dimension of the bias must be contiguous: call .contiguous() first")
