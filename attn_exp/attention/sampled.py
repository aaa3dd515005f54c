"""The float32 reference of a large case, for the rows alone that a judgement looks at.

Without gradients only rows of the output are computed. A gradient of a key depends on all queries: their log-sum-exp
and output are computed first, whole, and from these the drawn rows of dq and the drawn keys of dk and dv.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attn_exp.attention.formula import masked, seen_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import SLICE_BYTES, capped, row_statistics
from attn_exp.attention.sampling import draw_rows, rows_of
from attn_exp.core.case import Case


@dataclass(frozen=True)
class Sampled:
    """Rows of the reference, in float32.

    Attributes:
        tensors: by name, (batch, heads, n, dim); `out` whole if gradients were asked for.
        places: by name, which rows these are, (batch, heads, n); a tensor without an entry is whole.
        largest_score: the largest magnitude of a score of the drawn rows, scaled and before a softcap.
    """

    tensors: dict[str, torch.Tensor]
    places: dict[str, torch.Tensor]
    largest_score: float


@torch.no_grad()
def sampled_reference(case: Case, inputs: Inputs, *, with_gradients: bool) -> Sampled:
    """Draw rows and return the reference at them."""
    inputs = inputs.numbers()
    device = inputs.q_bhsd.device
    rows = draw_rows(case.batch, case.q_heads, case.q_len)
    if not with_gradients:
        out, largest = _out(case, inputs, rows)
        return Sampled({"out": out}, {"out": rows.to(device)}, largest)
    out, lse = row_statistics(case, inputs)
    delta = (out * inputs.d_out_bhsd).sum(-1)
    keys = draw_rows(case.batch, case.kv_heads, case.kv_len)
    dq, largest = _dq(case, inputs, rows, lse, delta)
    dk, dv = _dk_dv(case, inputs, keys, lse, delta)
    on_device = rows.to(device), keys.to(device)
    places = dict(zip(("dq", "dk", "dv"), (on_device[0], on_device[1], on_device[1]), strict=True))
    return Sampled({"out": out, "dq": dq, "dk": dk, "dv": dv}, places, largest)


def _out(case: Case, inputs: Inputs, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the output at `rows` (batch, q_heads, n), and the largest magnitude of a score."""
    out = torch.empty(*rows.shape, case.value_dim, device=inputs.q_bhsd.device)
    by_head = _grouped(case, out)
    largest = [torch.zeros((), device=out.device)]
    for part, (_, values), scores, hidden in _scores_of_rows(case, inputs, rows):
        largest.append(scores.abs().amax())
        scores, _ = capped(case, scores)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        if case.keyless:
            weights.nan_to_num_(0.0)
        by_head[part] = (weights @ values).reshape(by_head[part].shape)

    return out, torch.stack(largest).max().item()


def _dq(
    case: Case, inputs: Inputs, rows: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return dq at `rows` (batch, q_heads, n), and the largest magnitude of a score.

    `lse` and `delta` (batch, q_heads, q_len) are the log-sum-exp and <d_out, out> of all rows.
    """
    device = inputs.q_bhsd.device
    places = rows.to(device)
    dq = torch.empty(*rows.shape, case.head_dim, device=device)
    by_head = _grouped(case, dq)
    d_out = _grouped(case, rows_of(inputs.d_out_bhsd, places))
    own_lse, own_delta = (_grouped(case, tensor.gather(-1, places).unsqueeze(-1)) for tensor in (lse, delta))
    largest = [torch.zeros((), device=device)]
    for part, (keys, values), scores, hidden in _scores_of_rows(case, inputs, rows):
        largest.append(scores.abs().amax())
        scores, slope = capped(case, scores)
        weights = scores.sub_(own_lse[part].flatten(1, 2)).exp_()
        if hidden is not None:
            weights.masked_fill_(hidden, 0.0)
        d_scores = (d_out[part].flatten(1, 2).float() @ values.mT).sub_(own_delta[part].flatten(1, 2)).mul_(weights)
        if slope is not None:
            d_scores *= slope
        by_head[part] = (d_scores @ keys).mul_(case.head_dim**-0.5).reshape(by_head[part].shape)
    return dq, torch.stack(largest).max().item()


def _dk_dv(
    case: Case, inputs: Inputs, drawn: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dk and dv at the keys `drawn` (batch, kv_heads, n); `lse` and `delta` are those of all rows."""
    device = inputs.q_bhsd.device
    places = drawn.to(device)
    dk, dv = (torch.zeros(*drawn.shape, dim, device=device).flatten(0, 1) for dim in (case.head_dim, case.value_dim))
    keys, values = (rows_of(tensor, places).float().flatten(0, 1) for tensor in (inputs.k_bhsd, inputs.v_bhsd))
    queries, d_out = _grouped(case, inputs.q_bhsd.detach()), _grouped(case, inputs.d_out_bhsd)
    lse, delta = (_grouped(case, tensor.unsqueeze(-1)) for tensor in (lse, delta))
    at = drawn.flatten(0, 1)
    group, positions = case.q_heads // case.kv_heads, torch.arange(case.q_len)
    first, last = seen_keys(case, positions)
    for heads, rows in _parts(len(keys), case.q_len, group * at.shape[-1], device.type, causal=case.causal):
        # Of ascending keys, those up to the last that any of these rows sees.
        seen = slice(0, int((at[heads] <= last[rows].max()).sum(-1).max()))
        if not seen.stop:
            continue
        q = queries[heads, :, rows].float().flatten(1, 2) * case.head_dim**-0.5
        scores, slope = capped(case, q @ keys[heads, seen].mT)
        weights = scores.sub_(lse[heads, :, rows].flatten(1, 2)).exp_()
        if masked(case):
            key = places.flatten(0, 1)[heads, None, seen]
            bounds = (bound[rows].to(device).repeat(group)[None, :, None] for bound in (first, last))
            weights.masked_fill_((key < next(bounds)) | (key > next(bounds)), 0.0)
        d_result = d_out[heads, :, rows].float().flatten(1, 2)
        dv[heads, seen] += weights.mT @ d_result
        d_scores = (d_result @ values[heads, seen].mT).sub_(delta[heads, :, rows].flatten(1, 2)).mul_(weights)
        if slope is not None:
            d_scores *= slope
        dk[heads, seen] += d_scores.mT @ q
    return dk.reshape(*drawn.shape, -1), dv.reshape(*drawn.shape, -1)


_Part = tuple[slice, slice, slice]


def _scores_of_rows(
    case: Case, inputs: Inputs, rows: torch.Tensor
) -> Iterator[tuple[_Part, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor | None]]:
    """Yield a part of the rows, its keys and values, its scores, and which keys are hidden from these rows."""
    device = inputs.q_bhsd.device
    queries = _grouped(case, rows_of(inputs.q_bhsd, rows.to(device)))
    k, v = (tensor.detach().flatten(0, 1) for tensor in (inputs.k_bhsd, inputs.v_bhsd))
    first, last = (_grouped(case, bound) for bound in seen_keys(case, rows))
    group, count = queries.shape[1:3]
    for heads, some in _parts(len(k), count, group * case.kv_len, device.type, causal=case.causal):
        part = heads, slice(None), some
        seen = slice(0, max(1, int(last[part].max()) + 1))
        keys, values = k[heads, seen].float(), v[heads, seen].float()
        q = queries[part].float().flatten(1, 2)
        hidden = None
        if masked(case):
            key = torch.arange(seen.stop, device=device)
            hidden = key > last[part].flatten(1).to(device)[..., None]
            if case.window is not None or case.lengths is not None:
                hidden |= key < first[part].flatten(1).to(device)[..., None]
        yield part, (keys, values), (q @ keys.mT).mul_(case.head_dim**-0.5), hidden


def _grouped(case: Case, tensor: torch.Tensor) -> torch.Tensor:
    """View (batch, q_heads, ...) as (batch * kv_heads, group, ...): the queries of a group share their keys."""
    return tensor.reshape(-1, case.q_heads // case.kv_heads, *tensor.shape[2:])


def _parts(heads: int, rows: int, width: int, device: str, *, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield slices of key-value heads and of rows with at most `SLICE_BYTES` of scores, `width` of them a row."""
    fit = max(1, SLICE_BYTES[device] // (4 * width))
    # Under a causal mask several parts skip hidden keys.
    at_once = min(rows, fit, max(16, -(-rows // 8)) if causal else rows)
    heads_at_once = max(1, fit // at_once)
    for head in range(0, heads, heads_at_once):
        for row in range(0, rows, at_once):
            yield slice(head, min(head + heads_at_once, heads)), slice(row, min(row + at_once, rows))
