"""The float32 reference of a large case, only for the rows that a judgement looks at.

Rows of the output and of dq need only their own queries. A gradient of a key needs all queries of its head. So dk and
dv are computed for as many heads as `draw_heads` affords, drawn for each judgement.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attn_exp.attention.formula import scored_with_slope, seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import SLICE_BYTES
from attn_exp.attention.sampling import Places, draw_heads
from attn_exp.attention.scores import added_scores, sinks_at, softmax
from attn_exp.core.case.case import Case

# Bytes of one part's scores under a causal mask, by device.
_LEAST_BYTES = {"cuda": 1 << 28, "cpu": 0}


@dataclass(frozen=True)
class Sampled:
    """Rows of the reference, in float32.

    Attributes:
        tensors: by name, (1, heads, n, dim).
        places: by name, which heads and rows these are.
        largest_score: the largest magnitude of a score of the drawn queries, scaled and before a softcap.
    """

    tensors: dict[str, torch.Tensor]
    places: dict[str, Places]
    largest_score: float


def draw_places(case: Case, kv_heads: torch.Tensor, heads_of_keys: torch.Tensor | None = None) -> tuple[Places, Places]:
    """Draw rows of the queries and of the keys of some key-value heads, which ascend and are counted over the batch.

    Gradients of keys are judged of `heads_of_keys`, by default of all.
    """
    group = case.q_heads // case.kv_heads
    q_heads = (kv_heads[:, None] * group + torch.arange(group)).flatten()
    return (
        Places.drawn(q_heads, case.q_len, case.q_heads),
        Places.drawn(kv_heads if heads_of_keys is None else heads_of_keys, case.kv_len, case.kv_heads),
    )


@torch.no_grad()
def sampled_reference(
    case: Case, inputs: Inputs, *, with_gradients: bool, places: tuple[Places, Places] | None
) -> Sampled:
    """Return the reference at rows of queries and keys, which are drawn from all heads by default."""
    inputs = inputs.numbers()
    device = inputs.q_bhsd.device
    if places is None:
        scores = case.q_heads // case.kv_heads * case.q_len * case.kv_len
        heads = torch.arange(case.batch * case.kv_heads)
        places = draw_places(case, heads, draw_heads(len(heads), scores, device.type))
    of_queries, of_keys = places
    tensors, largest = _of_queries(case, inputs, of_queries, with_gradients=with_gradients)
    found = dict.fromkeys(tensors, of_queries.to(device))
    if with_gradients:
        keys = of_keys.to(device)
        tensors["dk"], tensors["dv"] = _of_keys(case, inputs, keys)
        found |= {"dk": keys, "dv": keys}
    return Sampled(tensors, found, largest)


def _of_queries(
    case: Case, inputs: Inputs, rows: Places, *, with_gradients: bool
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the output, and with gradients dq, at rows of all heads, and the largest magnitude of a score."""
    device = inputs.q_bhsd.device
    on_device = rows.to(device)
    queries, d_out = (_grouped(case, on_device.of(tensor)) for tensor in (inputs.q_bhsd, inputs.d_out_bhsd))
    kv_heads = on_device.heads[:: case.q_heads // case.kv_heads] // (case.q_heads // case.kv_heads)
    k, v = (tensor.detach().flatten(0, 1) for tensor in (inputs.k_bhsd, inputs.v_bhsd))
    if len(kv_heads) < len(k):
        k, v = k[kv_heads], v[kv_heads]
    first, last = (_grouped(case, bound.unsqueeze(0)) for bound in seen_keys(case, rows.rows.cpu()))
    out = torch.empty(d_out.shape, device=device)
    dq = torch.empty(queries.shape, device=device) if with_gradients else None
    largest: list[torch.Tensor] = []
    group, count = queries.shape[1:3]
    q_heads = on_device.heads.reshape(-1, group)
    at = on_device.rows.expand(len(on_device.heads), -1).unflatten(0, (-1, group))
    sinks = _sinks(case, q_heads, count)
    for heads, some in _parts(len(k), count, group * case.kv_len, device.type, causal=case.causal):
        part = heads, slice(None), some
        seen = slice(0, max(1, int(last[part].max()) + 1))
        keys, values = k[heads, seen].float(), v[heads, seen].float()
        scores = (queries[part].float().flatten(1, 2) @ keys.mT).mul_(case.head_dim**-0.5)
        largest += scores.aminmax()
        bounds = (bound[part].flatten(1).to(device) for bound in (first, last))
        added = _added(case, q_heads[heads], at[heads, :, some], seen)
        scores, slope = _capped_and_hidden(case, scores, added, *bounds)
        weights = softmax(scores, None if sinks is None else sinks[part].flatten(1, 2))
        if case.keyless:
            # A row of minus infinities has no softmax.
            weights.nan_to_num_(0.0)
        result = weights @ values
        out[part] = result.reshape(out[part].shape)
        if dq is not None:
            d_scores = _d_scores(d_out[part].float().flatten(1, 2), result, values, weights, slope)
            dq[part] = (d_scores @ keys).mul_(case.head_dim**-0.5).reshape(dq[part].shape)
    tensors = {"out": out} | ({} if dq is None else {"dq": dq})
    most = torch.stack(largest).abs().max().item()
    return {name: tensor.reshape(1, -1, count, tensor.shape[-1]) for name, tensor in tensors.items()}, most


def _of_keys(case: Case, inputs: Inputs, drawn: Places) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dk and dv at the drawn keys."""
    device = inputs.q_bhsd.device
    queries, d_out = (_grouped(case, tensor.detach())[drawn.heads] for tensor in (inputs.q_bhsd, inputs.d_out_bhsd))
    k, v = (tensor.detach().flatten(0, 1)[drawn.heads] for tensor in (inputs.k_bhsd, inputs.v_bhsd))
    own_values = drawn.of(inputs.v_bhsd).squeeze(0).float()
    dk, dv = (torch.zeros(*drawn.rows.shape, dim, device=device) for dim in (case.head_dim, case.value_dim))
    group, at = queries.shape[1], drawn.rows.cpu()
    q_heads = drawn.heads[:, None] * group + torch.arange(group, device=device)
    sinks = _sinks(case, q_heads, case.q_len)
    first, last = seen_keys(case, torch.arange(case.q_len))
    for heads, rows in _parts(len(k), case.q_len, group * case.kv_len, device.type, causal=case.causal):
        seen = slice(0, max(1, int(last[rows].max()) + 1))
        # Keys ascend: take those up to the last that any of these rows sees.
        own = heads, slice(0, int((at[heads] < seen.stop).sum(-1).max()))
        q = queries[heads, :, rows].float().flatten(1, 2) * case.head_dim**-0.5
        bounds = tuple(bound[rows].to(device).repeat(group)[None] for bound in (first, last))
        added = _added(case, q_heads[heads], torch.arange(rows.start, rows.stop, device=device), seen)
        scores, slope = _capped_and_hidden(case, q @ k[heads, seen].float().mT, added, *bounds)
        weights = softmax(scores, None if sinks is None else sinks[heads, :, rows].flatten(1, 2))
        if case.keyless:
            # A query that sees no key gives every key no weight.
            weights.nan_to_num_(0.0)
        result = weights @ v[heads, seen].float()
        d_result = d_out[heads, :, rows].float().flatten(1, 2)
        columns = drawn.rows[own].clamp(max=seen.stop - 1).unsqueeze(1).expand(-1, q.shape[1], -1)
        weights = weights.gather(-1, columns)
        # Keys beyond the last that these rows see, of heads that have fewer before it than others.
        weights.masked_fill_((drawn.rows[own] >= seen.stop).unsqueeze(1), 0.0)
        dv[own] += weights.mT @ d_result
        slope = slope if slope is None else slope.gather(-1, columns)
        dk[own] += _d_scores(d_result, result, own_values[own], weights, slope).mT @ q
    return dk.unsqueeze(0), dv.unsqueeze(0)


def _sinks(case: Case, heads: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Return the sink of each row of query heads (kv_heads, group) as (kv_heads, group, rows, 1)."""
    sinks = sinks_at(case, heads)
    return None if sinks is None else sinks.float()[..., None, None].expand(-1, -1, rows, 1)


def _added(case: Case, heads: torch.Tensor, rows: torch.Tensor, keys: slice) -> torch.Tensor | None:
    """Return what is added to scores of query heads (kv_heads, group) as (kv_heads, group x rows, keys)."""
    added = added_scores(case, heads, rows, torch.arange(keys.stop, device=heads.device))
    return None if added is None else added.flatten(1, 2)


def _capped_and_hidden(
    case: Case, scores: torch.Tensor, added: torch.Tensor | None, first: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scores (heads, rows, n) of the first n keys after softcap, biases and mask, and the softcap's slope.

    They are overwritten. Each row sees the keys from `first` to `last` (heads or 1, rows).
    """
    scores, slope = scored_with_slope(case, scores)
    if added is not None:
        scores += added
    if not case.dense:
        key = torch.arange(scores.shape[-1], device=scores.device)
        hidden = key > last[..., None]
        if case.mask.first is not None or case.lengths is not None:
            hidden |= key < first[..., None]
        scores.masked_fill_(hidden, float("-inf"))
    return scores, slope


def _d_scores(
    d_out: torch.Tensor, out: torch.Tensor, values: torch.Tensor, weights: torch.Tensor, slope: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of the scores that have these weights and values."""
    d_scores = (d_out @ values.mT).sub_((d_out * out).sum(-1, keepdim=True)).mul_(weights)
    return d_scores if slope is None else d_scores.mul_(slope)


def _grouped(case: Case, tensor: torch.Tensor) -> torch.Tensor:
    """View (batch, q_heads, ...) as (batch * kv_heads, group, ...): the queries of a group share their keys."""
    return tensor.reshape(-1, case.q_heads // case.kv_heads, *tensor.shape[2:])


def _parts(heads: int, rows: int, width: int, device: str, *, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield slices of key-value heads and of rows with at most `SLICE_BYTES` of scores, `width` of them a row."""
    fit = max(1, SLICE_BYTES[device] // (4 * width))
    # Under a causal mask several parts skip hidden keys; small ones would take longer to be launched than to run.
    least = max(16, -(-rows // 8), _LEAST_BYTES[device] // (4 * width * heads))
    at_once = min(rows, fit, least if causal else rows)
    heads_at_once = max(1, fit // at_once)
    for head in range(0, heads, heads_at_once):
        for row in range(0, rows, at_once):
            yield slice(head, min(head + heads_at_once, heads)), slice(row, min(row + at_once, rows))
