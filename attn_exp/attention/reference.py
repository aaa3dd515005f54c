"""The float32 reference of the accuracy check, computed in slices."""

from collections.abc import Iterator
from typing import Any

import torch

from attn_exp.attention.formula import hidden_keys, scored_with_slope, seen_keys
from attn_exp.attention.inputs import Attention, Inputs
from attn_exp.attention.scores import added_scores, bias_tensor, log_sum, sinks_at, softmax
from attn_exp.core.case.case import Case

# Scores of one slice. Larger slices are no faster (794 against 782 ms for 16 x 16 x 8192 x 8192 on an H200). On a CPU
# they stay in its caches: 109 instead of 150 ms for 4 x 2048 x 2048 with gradients on two cores.
SLICE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
# Keys and values of one slice in float32: with one query they are more than its scores.
_KEY_BYTES = 1 << 30
# Under a causal mask shorter slices skip more hidden keys.
CAUSAL_ROWS = {"cuda": 1024, "cpu": 256}


def reference(
    case: Case, inputs: Inputs, *, with_gradients: bool, precision: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return `out`, and with gradients `dq`, `dk`, `dv`, in `precision` and the shapes of output, q, k and v.

    A query that sees no key gets zeros. Codes are dequantised first: their rounding is not the backend's error.
    """
    tensors = _sliced(case, inputs, with_gradients=with_gradients, precision=precision)
    return dict(zip(("out", "dq", "dk", "dv"), tensors, strict=False))


def reference_and_largest_score(
    case: Case, inputs: Inputs, *, with_gradients: bool
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the float32 `reference`, and the largest magnitude of a score of a visible key or of one computed with it.

    Scores are scaled, and those before a softcap.
    """
    largest: list[torch.Tensor] = []
    tensors = _sliced(case, inputs, with_gradients=with_gradients, largest=largest)
    named = dict(zip(("out", "dq", "dk", "dv"), tensors, strict=False))
    return named, torch.stack(largest).max().item()


def reference_attention(case: Case) -> Attention:
    """Return the reference as a differentiable function of q, k and v in their own precision, float32 or float64."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Reference.apply(q, k, v, case)  # type: ignore[no-untyped-call]
        return out

    return attention


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
        ctx.case = case
        ctx.save_for_backward(q, k, v)
        shape_of_out = q.new_empty(1).expand(*q.shape[:-1], v.shape[-1])
        return _sliced(case, Inputs(q, k, v, shape_of_out), with_gradients=False, precision=q.dtype)[0]

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        inputs = Inputs(q, k, v, d_out)
        return *_sliced(ctx.case, inputs, with_gradients=True, precision=d_out.dtype)[1:], None


@torch.no_grad()
def sink_gradients(case: Case, inputs: Inputs, kv_heads: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return `d_sink` (1, heads, 1, 1) in float32 of the query heads on some key-value heads, which ascend.

    Also return the root mean square of what it would be if its terms had random signs.
    """
    inputs = inputs.numbers()
    device, group = inputs.q_bhsd.device, case.q_heads // case.kv_heads
    heads = (kv_heads[:, None] * group + torch.arange(group)).flatten()
    of_heads = sinks_at(case, heads.to(device))
    assert of_heads is not None
    sinks = of_heads.float().reshape(-1, group, 1, 1)
    total, squares = torch.zeros_like(sinks), torch.zeros_like(sinks)
    for batch in range(case.batch):
        q, d_out = (
            one.detach()[batch, heads.to(device)].unflatten(0, (-1, group))
            for one in (inputs.q_bhsd, inputs.d_out_bhsd)
        )
        k, v = (one.detach()[batch, kv_heads.to(device)].unsqueeze(1) for one in (inputs.k_bhsd, inputs.v_bhsd))
        for some, rows in _slices(case, len(kv_heads), device.type):
            seen = slice(0, _last_seen_key(case, rows))
            scores = (q[some, :, rows].float() * case.head_dim**-0.5) @ k[some, :, seen].float().mT
            scores, _ = scored_with_slope(case, scores)
            _add(case, scores, heads.reshape(-1, group)[some].to(device), rows)
            _hide(case, scores, rows)
            lse = log_sum(scores, sinks[some])
            result = torch.exp(scores - lse) @ v[some, :, seen].float()
            terms = torch.exp(sinks[some] - lse) * (d_out[some, :, rows].float() * result).sum(-1, keepdim=True)
            total[some] -= terms.sum(2, keepdim=True)
            squares[some] += terms.square().sum(2, keepdim=True)
    return total.reshape(1, -1, 1, 1), squares.mean().sqrt().item()


@torch.no_grad()
def _sliced(
    case: Case,
    inputs: Inputs,
    *,
    with_gradients: bool,
    precision: torch.dtype = torch.float32,
    largest: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    inputs = inputs.numbers()
    device = inputs.q_bhsd.device
    group = case.q_heads // case.kv_heads
    # (batch * kv_heads, group, length, dim): the queries of a group share their keys.
    q = inputs.q_bhsd.reshape(-1, group, case.q_len, case.head_dim)
    d_out = inputs.d_out_bhsd.reshape(-1, group, case.q_len, case.value_dim)
    k = inputs.k_bhsd.reshape(-1, 1, case.kv_len, case.head_dim)
    v = inputs.v_bhsd.reshape(-1, 1, case.kv_len, case.value_dim)
    out = torch.empty(d_out.shape, dtype=precision, device=device)
    made = [out]
    q_heads = torch.arange(case.batch * case.q_heads, device=device).reshape(-1, group)
    sinks = sinks_at(case, q_heads)
    sinks = None if sinks is None else sinks.to(precision)[..., None, None]
    if with_gradients:
        made += [torch.zeros(tensor.shape, dtype=precision, device=device) for tensor in (q, k, v)]
    for heads, rows in _slices(case, len(q), device.type):
        seen = slice(0, _last_seen_key(case, rows))
        keys, values = k[heads, :, seen].to(precision), v[heads, :, seen].to(precision)
        queries = q[heads, :, rows].to(precision) * case.head_dim**-0.5
        scores = _times(case, queries, keys.mT)
        if largest is not None:
            least, most = scores.aminmax()
            largest.append(torch.maximum(-least, most))
        scores, slope = scored_with_slope(case, scores)
        _add(case, scores, q_heads[heads], rows)
        weights = _softmax(case, scores, rows, None if sinks is None else sinks[heads])
        out[heads, :, rows] = result = _times(case, weights, values)
        if with_gradients:
            _, dq, dk, dv = made
            d_result = d_out[heads, :, rows].to(precision)
            dv[heads, :, seen] += (weights.mT @ d_result).sum(1, keepdim=True)
            d_scores = d_result @ values.mT
            d_scores -= (d_result * result).sum(-1, keepdim=True)
            d_scores *= weights
            if slope is not None:
                d_scores *= slope
            dq[heads, :, rows] = d_scores @ keys * case.head_dim**-0.5
            dk[heads, :, seen] += (d_scores.mT @ queries).sum(1, keepdim=True)
    shapes = (inputs.d_out_bhsd, *inputs.qkv)
    return tuple(tensor.reshape(like.shape) for tensor, like in zip(made, shapes, strict=False))


def _times(case: Case, of_queries: torch.Tensor, of_keys: torch.Tensor) -> torch.Tensor:
    """Return products of (heads, group, rows, n) with (heads, 1, n, m).

    PyTorch copies the second one for each of a group, which for latents would be 128 copies.
    """
    if not case.latent:
        return of_queries @ of_keys
    products: torch.Tensor = (of_queries.flatten(1, 2) @ of_keys.squeeze(1)).unflatten(1, of_queries.shape[1:3])
    return products


def masked_scores(case: Case, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return whole scores (batch, q_heads, q_len, kv_len) after softcap, biases and mask, and the softcap's slope."""
    scores, slope = scored_with_slope(case, scores)
    bias = bias_tensor(case, scores.device, scores.dtype)
    scores = scores if bias is None else scores + bias
    if not case.dense:
        scores = scores.masked_fill(hidden_keys(case, 0, case.q_len, scores.device), float("-inf"))
    return scores, slope


def _add(case: Case, scores: torch.Tensor, heads: torch.Tensor, rows: slice) -> None:
    """Add ALiBi and biases to scores (..., rows, keys) of query heads (...), which has only the first keys."""
    queries = torch.arange(rows.start, rows.stop, device=scores.device)
    keys = torch.arange(scores.shape[-1], device=scores.device)
    added = added_scores(case, heads, queries, keys, scores.dtype)
    if added is not None:
        scores += added


def _softmax(case: Case, scores: torch.Tensor, rows: slice, sinks: torch.Tensor | None) -> torch.Tensor:
    _hide(case, scores, rows)
    weights = softmax(scores, sinks)
    # A row of minus infinities has no softmax.
    return weights.nan_to_num_(0.0) if case.keyless else weights


def _hide(case: Case, scores: torch.Tensor, rows: slice) -> None:
    """Set the scores of hidden keys to minus infinity; `scores` (..., rows, keys) has only the first keys."""
    if case.dense:
        return
    # A causal mask hides no key from a later query that it shows to the first.
    only_causal = case.mask.first is None and case.lengths is None
    first = min(scores.shape[-1], max(0, rows.start + case.offset + 1)) if only_causal else 0
    hidden = hidden_keys(case, rows.start, rows.stop - rows.start, scores.device, first, scores.shape[-1])
    scores[..., first:].masked_fill_(hidden, float("-inf"))


def _last_seen_key(case: Case, rows: slice) -> int:
    """Return one past the last key that any of these queries sees, at least 1; later keys need not be computed."""
    return max(1, int(seen_keys(case, torch.tensor([rows.stop - 1]))[1]) + 1)


def _slices(case: Case, heads: int, device: str) -> Iterator[tuple[slice, slice]]:
    """Yield slices of key-value heads, and of queries if one head's scores are too large."""
    row_bytes = 4 * (case.q_heads // case.kv_heads) * case.kv_len
    rows_that_fit = max(1, SLICE_BYTES[device] // row_bytes)
    rows_at_once = min(case.q_len, rows_that_fit, CAUSAL_ROWS[device] if case.causal else case.q_len)
    keys_that_fit = _KEY_BYTES // (4 * case.kv_len * (case.head_dim + case.value_dim))
    heads_at_once = max(1, min(rows_that_fit // rows_at_once, keys_that_fit))
    for head in range(0, heads, heads_at_once):
        for row in range(0, case.q_len, rows_at_once):
            yield slice(head, min(head + heads_at_once, heads)), slice(row, min(row + rows_at_once, case.q_len))
