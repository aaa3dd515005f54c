"""The formula of attention as written, and the masks of a case as tensors."""

import torch

from attn_exp.core.case import Case


def hidden_keys(case: Case, first_row: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return a boolean mask (rows, kv_len), True where a key is hidden from query `first_row` + i."""
    last_seen = torch.arange(first_row, first_row + rows, device=device) + case.offset
    key = torch.arange(case.kv_len, device=device)[None, :]
    hidden = torch.zeros(rows, case.kv_len, dtype=torch.bool, device=device)
    if case.causal:
        hidden |= key > last_seen[:, None]
    if case.window is not None:
        hidden |= key <= last_seen[:, None] - case.window
    if case.lengths is not None:
        sequence = sequence_ids(case, device)
        hidden |= sequence[None, :] != sequence[first_row : first_row + rows, None]
    return hidden


def sequence_ids(case: Case, device: torch.device) -> torch.Tensor:
    """Return the index of each token's packed sequence, (kv_len,)."""
    lengths = torch.tensor(case.lengths, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)


def masked(case: Case) -> bool:
    """Whether any key is hidden from any query."""
    return not case.dense


def formula(case: Case, mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute softmax(q kT / sqrt(d)) v in the tensors' dtype.

    `mask` (q_len, kv_len) is True where a key is hidden.
    """
    if case.kv_heads != case.q_heads:
        k = k.repeat_interleave(case.q_heads // case.kv_heads, dim=1)
        v = v.repeat_interleave(case.q_heads // case.kv_heads, dim=1)
    scores = q @ k.mT * case.head_dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v
