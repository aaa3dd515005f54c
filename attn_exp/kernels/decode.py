"""Attention of few queries over many keys, as in decoding: the keys of a head are split over programs, then merged.

One program computes all queries of all heads that share a key-value head, so that its keys are read once. Splitting
fills a GPU that has fewer key-value heads than processors, and merging weighs the parts by their sums of exponentials
(Flash-Decoding, https://pytorch.org/blog/flash-decoding/).
"""

import functools

import torch
import triton
import triton.language as tl

from attn_exp.kernels.bounds import LOG2_E
from attn_exp.kernels.device import load_keys
from attn_exp.kernels.launch import padded

# Queries of the heads that share a key-value head: more would not fit into the registers of one program.
LARGEST_ROWS = 64
# Fewer keys are not worth the merging.
LEAST_KEYS = 256
_BLOCK_N = 64
_MERGED_AT_ONCE = 16
_MOST_SPLITS = 64
# Programs for each processor.
_WAVES = 2


@triton.jit(do_not_specialize=["q_len", "kv_len", "offset", "chunk"])
def decode_kernel(
    q, k, v, slots, parts, sums_log2, q_strides, k_strides, v_strides, kv_heads, q_len, kv_len, offset, chunk, factor,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr, PAGED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one part of the keys: `parts` (heads, splits, rows, VALUE_DIM) and the logarithm of each row's sum.

    Rows are the queries of the first head of a group, then those of the next. Scores of base 2 are `factor` * q kT.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    batch, kv_head = head // kv_heads, head % kv_heads
    rows = tl.arange(0, BLOCK_M)
    query, of_group = rows % q_len, rows // q_len
    row_count = GROUP * q_len
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    first = tl.cast(batch, tl.int64) * q_strides[0] + (kv_head * GROUP + of_group).to(tl.int64) * q_strides[1]
    q_tile = tl.load(
        q + (first + query * q_strides[2])[:, None] + dims[None, :],
        mask=(rows < row_count)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    total = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    begin = split * chunk
    end = tl.minimum(begin + chunk, kv_len)
    for key in tl.range(begin, end, BLOCK_N):
        k_tile = load_keys(k, k_strides, slots, batch, kv_head, key, kv_len, BLOCK_N, BLOCK_D, DIM, False, PAGED)
        v_tile = load_keys(v, v_strides, slots, batch, kv_head, key, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM, False, PAGED)
        scores = tl.dot(q_tile, tl.trans(k_tile.to(q_tile.dtype)), input_precision="ieee") * factor
        keys = key + tl.arange(0, BLOCK_N)
        seen = (keys < end)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= (query + offset)[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # Until a row sees a key its maximum is -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        weights = weights.to(q_tile.dtype)
        total = tl.dot(weights, v_tile.to(q_tile.dtype), total * rescale[:, None], input_precision="ieee")
    blind = row_sum == 0.0
    row_sum = tl.where(blind, 1.0, row_sum)
    part = (tl.cast(head, tl.int64) * tl.num_programs(1) + split) * row_count + rows
    stored = (rows < row_count)[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(parts + part[:, None] * VALUE_DIM + value_dims[None, :], total / row_sum[:, None], mask=stored)
    tl.store(sums_log2 + part, tl.where(blind, -float("inf"), row_max + tl.log2(row_sum)), mask=rows < row_count)


@triton.jit(do_not_specialize=["q_len", "splits"])
def decode_merge_kernel(
    parts, sums_log2, out, out_strides, kv_heads, q_len, splits, v_scale,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row into `out`; zeros for a query that sees no key."""
    row_count = GROUP * q_len
    head, row = tl.program_id(0) // row_count, tl.program_id(0) % row_count
    value_dims = tl.arange(0, BLOCK_DV)
    total = tl.zeros([BLOCK_DV], tl.float32)
    largest = tl.full([], -float("inf"), tl.float32)
    weight = tl.zeros([], tl.float32)
    for begin in tl.range(0, splits, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        part = (tl.cast(head, tl.int64) * splits + split) * row_count + row
        sums = tl.load(sums_log2 + part, mask=split < splits, other=-float("inf"))
        tile = tl.load(
            parts + part[:, None] * VALUE_DIM + value_dims[None, :],
            mask=(split < splits)[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(sums, 0))
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(sums - shift)
        rescale = tl.exp2(largest - shift)
        total = total * rescale + tl.sum(weights[:, None] * tile, 0)
        weight = weight * rescale + tl.sum(weights, 0)
        largest = new_largest
    total = total * (v_scale / tl.where(weight == 0.0, 1.0, weight))
    batch, q_head = head // kv_heads, head % kv_heads * GROUP + row // q_len
    first = tl.cast(batch, tl.int64) * out_strides[0] + tl.cast(q_head, tl.int64) * out_strides[1]
    place = out + first + row % q_len * out_strides[2] + value_dims
    tl.store(place, total.to(out.dtype.element_ty), mask=value_dims < VALUE_DIM)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@torch.library.custom_op("attn_exp::triton_decode", mutates_args=())
def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
    v_scale: float,
    causal: bool,
    offset: int,
) -> torch.Tensor:
    """Compute softmax(scale * q kT) v * v_scale of few queries; forward only.

    Args:
        q: (batch, q_heads, q_len, head_dim), with at most `LARGEST_ROWS` queries of the heads that share a key.
        k: (batch, kv_heads, kv_len, head_dim), or with `slots` a pool (1, kv_heads, slots, head_dim).
        v: the same with value_dim. The last stride of each must be 1.
        slots: the place of each key in the pools, int32 (batch, kv_len), or None.
        scale: factor of the scores.
        v_scale: factor of the values.
        causal: query i sees only keys j <= i + offset.
        offset: the last key that query 0 sees.

    Returns:
        (batch, q_heads, q_len, value_dim), contiguous.
    """
    batch, q_heads, q_len, dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    kv_len = k.shape[2] if slots is None else slots.shape[1]
    heads, rows = batch * kv_heads, q_heads // kv_heads * q_len
    wanted = min(_MOST_SPLITS, triton.cdiv(_WAVES * _processors(q.device), heads), triton.cdiv(kv_len, LEAST_KEYS))
    chunk = triton.cdiv(triton.cdiv(kv_len, wanted), _BLOCK_N) * _BLOCK_N
    splits = triton.cdiv(kv_len, chunk)
    parts = torch.empty(heads, splits, rows, value_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(heads, splits, rows, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, q_heads, q_len, value_dim, dtype=q.dtype, device=q.device)
    sizes = {"kv_heads": kv_heads, "q_len": q_len, "GROUP": q_heads // kv_heads, "VALUE_DIM": value_dim}
    sizes["BLOCK_DV"] = padded(value_dim)
    with torch.cuda.device_of(q):
        decode_kernel[heads, splits](
            q, k, v, slots, parts, sums, q.stride()[:3], k.stride()[:3], v.stride()[:3],
            kv_len=kv_len, offset=offset, chunk=chunk, factor=scale * LOG2_E, DIM=dim, CAUSAL=causal,
            PAGED=slots is not None, BLOCK_D=padded(dim), BLOCK_M=max(16, triton.next_power_of_2(rows)),
            BLOCK_N=_BLOCK_N, num_warps=4, num_stages=3, **sizes,
        )  # fmt: skip
        decode_merge_kernel[(heads * rows,)](
            parts, sums, out, out.stride()[:3], splits=splits, v_scale=v_scale, BLOCK_S=_MERGED_AT_ONCE, num_warps=4,
            **sizes,
        )  # fmt: skip
    return out


@decode.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *slots_and_options: torch.Tensor | float | bool | None
) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])
