"""Attention in Helion, forward and backward: FlashAttention's online softmax, written as tiles of PyTorch.

Tensors are flattened to (batch * heads, length, dim). Scores are base 2, since exp2 is a GPU instruction. The backward
recomputes them in two kernels, one for dk and dv and one for dq (FlashAttention-2, arXiv:2307.08691, algorithm 2). It
needs no atomic additions, and gradients are reproducible.

Index vectors are transposed with `unsqueeze` instead of `[:, None]`. Helion 1.0 guesses a slice's dimension from its
length: it may take it for the head dimension, and its masks then have the wrong shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import helion
import helion.language as hl
import torch

LOG2_E = 1.4426950408889634
# The initial maximum of a row: below any score, but finite, as -inf minus itself would be NaN where a tile hides all
# keys.
LOWEST = -1e30


@dataclass(frozen=True)
class Problem:
    """Specialization of the kernels besides shapes: a `Case`'s masks; `offset` is `Case.offset`.

    Lengths are 2 or more: Helion 1.0 broadcasts a dimension of size 1 over a whole tile without masking the rest.
    """

    group: int
    scale: float
    causal: bool
    offset: int
    window: int | None
    softcap: float | None

    @property
    def constants(self) -> tuple[Any, ...]:
        """Return the kernels' arguments after their tensors."""
        return self.group, self.scale, self.causal, self.offset, self.window, self.softcap


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: hl.constexpr,
    scale: hl.constexpr,
    causal: hl.constexpr,
    offset: hl.constexpr,
    window: hl.constexpr,
    softcap: hl.constexpr,
    held: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output, and the base-2 logarithm of each row's sum of exponentials."""
    heads, q_len, head_dim = q.size()
    kv_len, value_dim = v.size(1), v.size(2)
    head_dim, value_dim = hl.specialize(head_dim), hl.specialize(value_dim)
    out = torch.empty([heads, q_len, value_dim], dtype=q.dtype, device=q.device)
    lse = torch.empty([heads, q_len], dtype=torch.float32, device=q.device)
    for tile_head, tile_q in hl.tile([heads, q_len], block_size=[1, held]):
        head = tile_head.begin
        queries = q[head, tile_q, :]
        highest = hl.full([tile_q], LOWEST, dtype=torch.float32)
        total = hl.zeros([tile_q], dtype=torch.float32)
        acc = hl.zeros([tile_q, value_dim], dtype=torch.float32)
        if window is not None:
            first = max(0, tile_q.begin + offset - window + 1)
        else:
            first = 0
        if causal:
            last = min(kv_len, tile_q.begin + held + offset)
        else:
            last = kv_len
        for tile_kv in hl.tile(first, last):
            keys = k[head // group, tile_kv, :]
            scores = hl.dot(queries, keys.T, out_dtype=torch.float32)
            if softcap is not None:
                scores = torch.tanh(scores * (scale / softcap)) * (softcap * LOG2_E)
            else:
                scores = scores * (scale * LOG2_E)
            if causal:
                seen = tile_q.index.unsqueeze(1) + offset >= tile_kv.index.unsqueeze(0)
                scores = torch.where(seen, scores, float("-inf"))
            if window is not None:
                seen = tile_q.index.unsqueeze(1) + offset - window < tile_kv.index.unsqueeze(0)
                scores = torch.where(seen, scores, float("-inf"))
            new_highest = torch.maximum(highest, torch.amax(scores, -1))
            weights = torch.exp2(scores - new_highest.unsqueeze(1))
            shrink = torch.exp2(highest - new_highest)
            total = total * shrink + torch.sum(weights, -1)
            acc = hl.dot(weights.to(v.dtype), v[head // group, tile_kv, :], acc=acc * shrink.unsqueeze(1))
            highest = new_highest
        out[head, tile_q, :] = (acc / total.unsqueeze(1)).to(out.dtype)
        lse[head, tile_q] = highest + torch.log2(total)
    return out, lse


def attention_row_sums(out: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """Compute what the softmax's gradient subtracts in each row: sum(out * d_out)."""
    heads, q_len, value_dim = out.size()
    value_dim = hl.specialize(value_dim)
    sums = torch.empty([heads, q_len], dtype=torch.float32, device=out.device)
    for tile_head, tile_q in hl.tile([heads, q_len], block_size=[1, None]):
        head = tile_head.begin
        product = out[head, tile_q, :].to(torch.float32) * d_out[head, tile_q, :].to(torch.float32)
        sums[head, tile_q] = torch.sum(product, -1)
    return sums


def attention_dk_dv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    lse: torch.Tensor,
    row_sums: torch.Tensor,
    group: hl.constexpr,
    scale: hl.constexpr,
    causal: hl.constexpr,
    offset: hl.constexpr,
    window: hl.constexpr,
    softcap: hl.constexpr,
    held: hl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of keys and values; tiles are (keys, queries), so that no result is transposed."""
    kv_heads, kv_len, head_dim = k.size()
    q_len, value_dim = q.size(1), v.size(2)
    head_dim, value_dim = hl.specialize(head_dim), hl.specialize(value_dim)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    for tile_head, tile_kv in hl.tile([kv_heads, kv_len], block_size=[1, held]):
        kv_head = tile_head.begin
        keys = k[kv_head, tile_kv, :]
        values = v[kv_head, tile_kv, :]
        dk_acc = hl.zeros([tile_kv, head_dim], dtype=torch.float32)
        dv_acc = hl.zeros([tile_kv, value_dim], dtype=torch.float32)
        if causal:
            first = max(0, tile_kv.begin - offset)
        else:
            first = 0
        if window is not None:
            last = min(q_len, tile_kv.begin + held - 1 + window - offset)
        else:
            last = q_len
        for member in hl.grid(group):
            head = kv_head * group + member
            for tile_q in hl.tile(first, last):
                queries = q[head, tile_q, :]
                d_outs = d_out[head, tile_q, :]
                scores = hl.dot(keys, queries.T, out_dtype=torch.float32)
                if softcap is not None:
                    capped = torch.tanh(scores * (scale / softcap))
                    weights = torch.exp2(capped * (softcap * LOG2_E) - lse[head, tile_q].unsqueeze(0))
                else:
                    weights = torch.exp2(scores * (scale * LOG2_E) - lse[head, tile_q].unsqueeze(0))
                if causal:
                    seen = tile_q.index.unsqueeze(0) + offset >= tile_kv.index.unsqueeze(1)
                    weights = torch.where(seen, weights, 0.0)
                if window is not None:
                    seen = tile_q.index.unsqueeze(0) + offset - window < tile_kv.index.unsqueeze(1)
                    weights = torch.where(seen, weights, 0.0)
                dv_acc = hl.dot(weights.to(v.dtype), d_outs, acc=dv_acc)
                d_weights = hl.dot(values, d_outs.T, out_dtype=torch.float32)
                d_scores = weights * (d_weights - row_sums[head, tile_q].unsqueeze(0))
                if softcap is not None:
                    d_scores = d_scores * (1.0 - capped * capped)
                dk_acc = hl.dot(d_scores.to(q.dtype), queries, acc=dk_acc)
        dk[kv_head, tile_kv, :] = (dk_acc * scale).to(dk.dtype)
        dv[kv_head, tile_kv, :] = dv_acc.to(dv.dtype)
    return dk, dv


def attention_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
    lse: torch.Tensor,
    row_sums: torch.Tensor,
    group: hl.constexpr,
    scale: hl.constexpr,
    causal: hl.constexpr,
    offset: hl.constexpr,
    window: hl.constexpr,
    softcap: hl.constexpr,
    held: hl.constexpr,
) -> torch.Tensor:
    """Compute the gradient of queries."""
    heads, q_len, head_dim = q.size()
    kv_len, value_dim = v.size(1), v.size(2)
    head_dim, value_dim = hl.specialize(head_dim), hl.specialize(value_dim)
    dq = torch.empty_like(q)
    for tile_head, tile_q in hl.tile([heads, q_len], block_size=[1, held]):
        head = tile_head.begin
        queries = q[head, tile_q, :]
        d_outs = d_out[head, tile_q, :]
        row_lse = lse[head, tile_q]
        row_sum = row_sums[head, tile_q]
        acc = hl.zeros([tile_q, head_dim], dtype=torch.float32)
        if window is not None:
            first = max(0, tile_q.begin + offset - window + 1)
        else:
            first = 0
        if causal:
            last = min(kv_len, tile_q.begin + held + offset)
        else:
            last = kv_len
        for tile_kv in hl.tile(first, last):
            keys = k[head // group, tile_kv, :]
            scores = hl.dot(queries, keys.T, out_dtype=torch.float32)
            if softcap is not None:
                capped = torch.tanh(scores * (scale / softcap))
                weights = torch.exp2(capped * (softcap * LOG2_E) - row_lse.unsqueeze(1))
            else:
                weights = torch.exp2(scores * (scale * LOG2_E) - row_lse.unsqueeze(1))
            if causal:
                seen = tile_q.index.unsqueeze(1) + offset >= tile_kv.index.unsqueeze(0)
                weights = torch.where(seen, weights, 0.0)
            if window is not None:
                seen = tile_q.index.unsqueeze(1) + offset - window < tile_kv.index.unsqueeze(0)
                weights = torch.where(seen, weights, 0.0)
            values = v[head // group, tile_kv, :]
            d_weights = hl.dot(d_outs, values.T, out_dtype=torch.float32)
            d_scores = weights * (d_weights - row_sum.unsqueeze(1))
            if softcap is not None:
                d_scores = d_scores * (1.0 - capped * capped)
            acc = hl.dot(d_scores.to(k.dtype), keys, acc=acc)
        dq[head, tile_q, :] = (acc * scale).to(dq.dtype)
    return dq


@dataclass(frozen=True)
class Kernels:
    """The kernels of one case, each compiled at its first call."""

    forward: Callable[..., Any]
    row_sums: Callable[..., Any]
    dk_dv: Callable[..., Any]
    dq: Callable[..., Any]


# For head dimensions up to the key: rows that a tile holds, rows that it iterates over, warps and stages. From a search
# over 64 and 128 on an H200 at batch 4, 4,096 tokens, 2,048 numbers each; 256 was run, not searched.
_FORWARD_TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 4, 2)}
_DK_DV_TILES = {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 1)}
_DQ_TILES = {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 1)}


def compiled(head_dim: int, autotune: str = "none") -> Kernels:
    """Return the kernels with tiles for a head dimension.

    With another `autotune` than `none` Helion searches the remaining parameters for each shape. The search excludes the
    rows of a tile. The bounds of a causal mask need arithmetic on a tile's block size or end, for which Helion 1.0 uses
    wrong numbers (its hint of 64, the tile's begin).
    """

    def tuned(function: Any, tiles: dict[int, tuple[int, int, int, int]]) -> Callable[..., Any]:
        held, walked, warps, stages = tiles[min(limit for limit in tiles if head_dim <= limit)]
        if autotune != "none":
            kernel = helion.kernel(function, static_shapes=True, autotune_effort=autotune)
        else:
            # The tiles of one head follow each other, so that its keys and values are in L2.
            config = helion.Config(block_sizes=[walked], num_warps=warps, num_stages=stages, loop_orders=[[1, 0]])
            kernel = helion.kernel(function, config=config, static_shapes=True)
        return lambda *arguments: kernel(*arguments, held)

    sums_config = helion.Config(block_sizes=[32], num_warps=4)
    return Kernels(
        forward=tuned(attention_forward, _FORWARD_TILES),
        row_sums=helion.kernel(attention_row_sums, config=sums_config, static_shapes=True),
        dk_dv=tuned(attention_dk_dv, _DK_DV_TILES),
        dq=tuned(attention_dq, _DQ_TILES),
    )
