"""Attention with a bug each, as a user's module has it: functions of q, k and v that need torch alone.

All take tensors (batch, heads, length, dim), and are right but for the bug that their name says.
"""

import ctypes

import torch

TILE = 64


def visible(q, k, *, causal, offset):
    """Which keys each query sees, (q_len, kv_len)."""
    row = torch.arange(q.shape[2])[:, None] + offset
    key = torch.arange(k.shape[2])[None, :]
    return key <= row if causal else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)


def right(q, k, v, *, causal, offset, softcap, seen=None, zeros=True):
    """Attention in float32, zeros for a query that sees no key."""
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.float().repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q, k, causal=causal, offset=offset) if seen is None else seen
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    weights = weights.nan_to_num(0) if zeros else weights
    return (weights @ v.float().repeat_interleave(group, 1)).to(q.dtype)


def off_by_one_at_a_tile(q, k, v, *, causal, offset, softcap):
    """A causal mask that lets each first query of a tile but the first see the key after its own."""
    seen = visible(q, k, causal=causal, offset=offset)
    row = torch.arange(q.shape[2])
    for first in row[(row % TILE == 0) & (row > 0)].tolist():
        seen[first, max(0, min(first + offset + 1, k.shape[2] - 1))] = True
    return right(q, k, v, causal=causal, offset=offset, softcap=softcap, seen=seen)


def nan_without_a_key(q, k, v, *, causal, offset, softcap):
    return right(q, k, v, causal=causal, offset=offset, softcap=softcap, zeros=False)


def segfaults_at_wide_heads(q, k, v, *, causal, offset, softcap):
    if q.shape[3] > 32 and causal:
        ctypes.string_at(0)
    return right(q, k, v, causal=causal, offset=offset, softcap=softcap)


def int32_strides(q, k, v, *, causal, offset, softcap):
    """Reads rows of k at offsets that wrap around at 2^31, as a kernel's that multiplies strides in 32 bits."""
    return right(q, read_at(k, offsets(k, k.stride())), v, causal=causal, offset=offset, softcap=softcap)


def offsets(k, strides):
    """The offset of each row of k, (batch, heads, length)."""
    batch, heads, rows = (torch.arange(size) * step for size, step in zip(k.shape[:3], strides, strict=False))
    return batch[:, None, None] + heads[:, None] + rows


def read_at(k, tops):
    """Rows of k's memory at offsets modulo 2^31: below the tensor's begin lies nothing that may be read."""
    flat = torch.as_strided(k, (k.untyped_storage().nbytes() // k.element_size(),), (1,), 0)
    places = (tops % (1 << 31))[..., None] + torch.arange(k.shape[3])
    return flat[places.clamp(max=flat.shape[0] - 1)]
