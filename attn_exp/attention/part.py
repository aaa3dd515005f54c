"""The part of a case on which its tolerances are measured."""

from dataclasses import replace

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.case.masks import NO_NUMBER

# Scores of the part: 8,192 x 8,192 take 2 ms in float64 on an H200.
PART_SCORES = {"cuda": 1 << 26, "cpu": 1 << 18}
# With fewer queries, heads of hard values differ much.
_FEW_QUERIES = 64
# Numbers of the keys of these: 1 GiB in float32.
_MOST_NUMBERS = 1 << 28


def part_of(case: Case, inputs: Inputs) -> tuple[Case, Inputs]:
    """Return one row of the batch with as many heads as fit, and only the first tokens if one head does not fit.

    Heads of hard values differ if they have few queries: then all of them, and more rows of the batch, as far as fit.
    """
    scores = PART_SCORES[inputs.q_bhsd.device.type]
    if inputs.kind != NORMAL and case.q_len < _FEW_QUERIES:
        scores *= 16
        keys = _MOST_NUMBERS // (case.q_heads * case.kv_len * case.head_dim)
        batch = min(case.batch, keys, scores // (case.q_heads * case.q_len * case.kv_len))
        if batch:
            rows = inputs.mapped(lambda tensor: tensor.detach()[:batch].requires_grad_(tensor.requires_grad))
            return replace(case, batch=batch), replace(rows, sink=None)
    side = max(1, int(scores**0.5))
    q_len, kv_len = case.q_len, case.kv_len
    if q_len * kv_len > scores:
        q_len, kv_len = min(q_len, max(side, scores // kv_len)), min(kv_len, max(side, scores // q_len))
    lengths, kv_lengths = _first(case.lengths, q_len), None
    if case.lengths is not None and case.kv_lengths is not None:
        lengths, kv_lengths = _first_requests(case.lengths, case.kv_lengths, q_len, kv_len)
        q_len, kv_len = sum(lengths), sum(kv_lengths)
    heads = max(1, min(case.kv_heads, scores // (q_len * kv_len)))
    # One query head for each key-value head: a group's sum is rounded once more, never less.
    part = replace(
        case, batch=1, q_heads=heads, kv_heads=heads, q_len=q_len, kv_len=kv_len, lengths=lengths, kv_lengths=kv_lengths
    )
    if part.keyless:
        part = replace(part, align="top_left", **NO_NUMBER)
    group = case.q_heads // case.kv_heads

    def cut(tensor: torch.Tensor, step: int, length: int) -> torch.Tensor:
        cut_out = tensor.detach()[:1, : heads * step : step, :length].contiguous()
        return cut_out.requires_grad_(tensor.requires_grad)

    return part, Inputs(
        cut(inputs.q_bhsd, group, q_len),
        cut(inputs.k_bhsd, 1, kv_len),
        cut(inputs.v_bhsd, 1, kv_len),
        cut(inputs.d_out_bhsd, group, q_len),
        inputs.scales,
        inputs.kind,
        latent=inputs.latent,
    )


def _first(lengths: tuple[int, ...] | None, tokens: int) -> tuple[int, ...] | None:
    """Return the packed sequences of the first `tokens` tokens, the last one truncated."""
    if lengths is None:
        return None
    kept, left = [], tokens
    for length in lengths:
        if left:
            kept.append(min(length, left))
            left -= kept[-1]
    return tuple(kept)


def _first_requests(
    lengths: tuple[int, ...], kv_lengths: tuple[int, ...], queries: int, keys: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return as many requests as have these queries and keys together, at least the first one, which is then cut."""
    kept = [(min(lengths[0], queries, keys), min(kv_lengths[0], keys))]
    for request in zip(lengths[1:], kv_lengths[1:], strict=True):
        if sum(own for own, _ in kept) + request[0] > queries or sum(own for _, own in kept) + request[1] > keys:
            break
        kept.append(request)
    return tuple(own for own, _ in kept), tuple(own for _, own in kept)
