"""The formula of attention as written, and the masks of a case as tensors."""

import torch

from attn_exp.core.case.case import Case


def hidden_keys(
    case: Case, first_row: int, rows: int, device: torch.device, first_key: int = 0, end_key: int | None = None
) -> torch.Tensor:
    """Return a boolean mask (rows, keys), True where a key is hidden from query `first_row` + i.

    The keys are those from `first_key` to before `end_key`, all by default.
    """
    first, last = seen_keys(case, torch.arange(first_row, first_row + rows, device=device))
    key = torch.arange(first_key, case.kv_len if end_key is None else end_key, device=device)
    return (key < first[:, None]) | (key > last[:, None])


def seen_keys(case: Case, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last key that each query of `rows` sees, in the shape of `rows`.

    It sees all between them; the last precedes the first if it sees none. Neither decreases from a query to the next.
    """
    first, last, own = _sequences(case, rows)
    own -= first
    begin, end = case.mask.first, case.mask.end
    if end is not None:
        last = torch.minimum(last, first + end.at(own, torch.clamp) - 1)
    if begin is not None:
        first = first + begin.at(own).clamp(min=0)
    return first, last


def own_keys(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Return the key of each query of `rows` that a causal mask shows it last, in the shape of `rows`.

    It may lie before the first key, and beyond the last.
    """
    return _sequences(case, rows)[2]


def _sequences(case: Case, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first and the last key of each query's sequence, and the query's own."""
    if case.lengths is None:
        return torch.zeros_like(rows), torch.full_like(rows, case.kv_len - 1), rows + case.offset
    lengths, kv_lengths = (
        torch.tensor(several, device=rows.device) for several in (case.lengths, case.kv_lengths or case.lengths)
    )
    ends, kv_ends = lengths.cumsum(0), kv_lengths.cumsum(0)
    sequence = torch.searchsorted(ends, rows.contiguous(), right=True)
    first, last = (kv_ends - kv_lengths)[sequence], kv_ends[sequence] - 1
    # Its last query sees its last key.
    own = last - (ends[sequence] - 1 - rows)
    return first, last, own


def sequence_ids(case: Case, device: torch.device) -> torch.Tensor:
    """Return the index of each token's packed sequence, (kv_len,)."""
    lengths = torch.tensor(case.lengths, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)


def formula(
    case: Case,
    mask: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(q kT / sqrt(d) + bias) v in the tensors' dtype.

    `mask` (q_len, kv_len) is True where a key is hidden. `sinks` (1, q_heads, 1, 1) are columns of the scores that have
    no value. `bias` (1, q_heads or 1, q_len, kv_len) is added after the softcap.
    """
    times = _times_shared if case.latent else torch.matmul
    if case.kv_heads != case.q_heads and not case.latent:
        k = k.repeat_interleave(case.q_heads // case.kv_heads, dim=1)
        v = v.repeat_interleave(case.q_heads // case.kv_heads, dim=1)
    scores = _scored(case, times(q, k.mT) * case.head_dim**-0.5)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
        return times(torch.softmax(scores, dim=-1)[..., :-1], v)
    return times(torch.softmax(scores, dim=-1), v)


def _scored(case: Case, scores: torch.Tensor) -> torch.Tensor:
    """Return scaled scores after the softcap."""
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    return scores


def scored_with_slope(case: Case, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores after the softcap, and their derivative with respect to those before it, None without one."""
    if case.softcap is None:
        return scores, None
    bent = torch.tanh(scores / case.softcap)
    slope = 1 - bent * bent
    return bent.mul_(case.softcap), slope


def _times_shared(of_queries: torch.Tensor, of_keys: torch.Tensor) -> torch.Tensor:
    """Return products of query heads (batch, q_heads, length, n) with matrices of the heads of keys that they share.

    As in DeepSeek-V3's code (inference/model.py, `absorb`): a copy of the latent for each head would take much memory.
    """
    kv_heads, length = of_keys.shape[1], of_queries.shape[2]
    groups = of_queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    products: torch.Tensor = (groups @ of_keys).unflatten(2, (-1, length)).flatten(1, 2)
    return products
