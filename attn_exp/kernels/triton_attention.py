"""Fused attention in Triton, forward and backward, as operators for autograd and `torch.compile`.

The kernels are in `forward_kernel` and `backward_kernels`, their arguments in `launch`.
"""

from typing import Any

import torch

from attn_exp.kernels.bounds import LOG2_E, Added, Bounds
from attn_exp.kernels.decode import decode
from attn_exp.kernels.launch import Scores, launch_dkdv, launch_dq, launch_forward, launch_rows

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
    slots: torch.Tensor | None = None,
    cache_scale: float = 1.0,
    decodes: bool = False,
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
        added: terms added to scores after the softcap (attn_exp/kernels/bounds.py); they have no gradient.
        slots: the position of each key, int32 (batch, kv_len), if `k_bhsd` and `v_bhsd` are pools (pages, page_size,
            kv_heads, dim): page x page_size + place in the page. There is no backward then. Slots outside of the pool
            are not detected, since that would wait for the GPU.
        cache_scale: factor of the numbers in the pools.
        decodes: split the keys over programs (attn_exp/kernels/decode.py): forward only, for few queries and no other
            mask or score than `causal`.

    Returns:
        (batch, q_heads, q_len, value_dim), with q's memory layout if their dimensions are equal.

    Raises:
        ValueError: the last dimension of q, k or v is not contiguous.
    """
    if slots is not None:
        # Pools (pages, page_size, kv_heads, dim) as views (batch, kv_heads, slots, dim).
        k_bhsd, v_bhsd = (
            pool.flatten(0, 1).transpose(0, 1).expand(len(q_bhsd), -1, -1, -1) for pool in (k_bhsd, v_bhsd)
        )
    if not q_bhsd.stride(3) == k_bhsd.stride(3) == v_bhsd.stride(3) == 1:
        raise ValueError("the last dimension of q, k and v must be contiguous: call .contiguous() first")
    head_dim, q_len = q_bhsd.shape[3], q_bhsd.shape[2]
    kv_len = k_bhsd.shape[2] if slots is None else slots.shape[1]
    scale = (head_dim**-0.5 if scale is None else scale) * cache_scale
    offset = kv_len - q_len if offset is None else offset
    added = Added() if added is None else added
    if window is not None:
        window = min(window, _LARGEST_POSITION)
    if decodes:
        decoded: torch.Tensor = decode(q_bhsd, k_bhsd, v_bhsd, slots, scale, cache_scale, causal, offset)
        return decoded
    mask = (None, None, 0) if bounds is None else (bounds.keys, bounds.queries, bounds.pairs)
    numbers = (added.slopes_log2, added.own_keys, added.bias)
    options = (sinks, *numbers, *mask, scale, causal, offset, window, softcap)
    if slots is not None:
        paged_out: torch.Tensor = _paged_forward(q_bhsd, k_bhsd, v_bhsd, slots, cache_scale, *options)
        return paged_out
    out: torch.Tensor = _forward(q_bhsd, k_bhsd, v_bhsd, *options)[0]
    return out


@torch.library.custom_op("attn_exp::triton_paged_attention", mutates_args=())
def _paged_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    v_scale: float,
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
) -> torch.Tensor:
    out, lse_log2 = _outputs(q, v)
    added, bounds = Added(slopes_log2, own_keys, bias), _bounds(key_bounds, query_bounds, pairs)
    scores = Scores(scale, causal, offset, window, softcap, bounds, added)
    with torch.cuda.device_of(q):
        launch_forward(q, k, v, out, lse_log2, scores, sinks_log2=_log2(sinks), slots=slots, v_scale=v_scale)
    return out


@_paged_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *slots_and_options: torch.Tensor | float | bool | int | None
) -> torch.Tensor:
    return _outputs(q, v)[0]


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
    added, bounds = Added(slopes_log2, own_keys, bias), _bounds(key_bounds, query_bounds, pairs)
    scores = Scores(scale, causal, offset, window, softcap, bounds, added)
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
    added, bounds = Added(slopes_log2, own_keys, bias), _bounds(key_bounds, query_bounds, pairs)
    scores = Scores(scale, causal, offset, window, softcap, bounds, added)
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
