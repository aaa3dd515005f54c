"""Triton kernels of the corpus: one FlashAttention forward, right or with one mistake, which constants choose.

Imported only where Triton is: by the entries in cheats/gpu/tiles.py, on a GPU or in Triton's interpreter.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def flash_fwd_splitkv(one):
    """Add zero to one number, under the name of another kernel."""
    tl.store(one, tl.load(one) + 0.0)


@triton.jit
def tile(
    q, k, v, block, head, q_len, kv_len, begin, end, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MISTAKE: tl.constexpr,
):  # fmt: skip
    """Return sums, maxima and weights' sums of one block of queries with the keys from begin to end."""
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    head = head.to(tl.int64)
    q_tile = tl.load(
        q + head * q_len * DIM + rows[:, None] * DIM + dims[None, :], mask=rows[:, None] < q_len, other=0.0
    )  # fmt: skip
    total = tl.zeros([BLOCK_M, DIM], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    log2_e = LOG2_E
    if MISTAKE == "constant":
        log2_e = 1.44
    for first in range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        at = head * kv_len * DIM + keys[:, None] * DIM + dims[None, :]
        k_tile = tl.load(k + at, mask=keys[:, None] < kv_len, other=0.0)
        v_tile = tl.load(v + at, mask=keys[:, None] < kv_len, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * log2_e)
        if MISTAKE != "tail":
            scores = tl.where(keys[None, :] < kv_len, scores, -float("inf"))
        if CAUSAL:
            seen = keys[None, :] <= rows[:, None]
            if MISTAKE == "diagonal":
                # The block's own diagonal in steps of 16 keys.
                seen = keys[None, :] // 16 <= rows[:, None] // 16
            scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        if MISTAKE == "maximum":
            new_max = tl.zeros([BLOCK_M], tl.float32)
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - shift)
        if MISTAKE == "maximum":
            rescale = tl.full([BLOCK_M], 1.0, tl.float32)
        weights = tl.exp2(scores - shift[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        if MISTAKE == "lazy":
            total = total * tl.where((rescale < 0.8) | (first == begin), rescale, 1.0)[:, None]
        elif MISTAKE != "rescale":
            total = total * rescale[:, None]
        row_max = new_max
        if MISTAKE == "fp8":
            weights = weights.to(tl.float8e4nv).to(tl.float32)
        total = tl.dot(weights.to(v_tile.dtype), v_tile, total, input_precision="ieee")
    return total, row_max, row_sum


@triton.jit
def written(
    out, block, head, q_len, total, row_sum, DIM: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Write one block of queries."""
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * q_len * DIM + rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out + at, (total / row_sum[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < q_len)


@triton.jit
def attention_kernel(
    q, k, v, out, q_len, kv_len, scale,
    DIM: tl.constexpr, CAUSAL: tl.constexpr, MISTAKE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program for a block of queries of a head."""
    block, head = tl.program_id(0), tl.program_id(1)
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, (block + 1) * BLOCK_M)
    total, _, row_sum = tile(
        q, k, v, block, head, q_len, kv_len, 0, end, scale, DIM, BLOCK_M, BLOCK_N, CAUSAL, MISTAKE
    )  # fmt: skip
    written(out, block, head, q_len, total, row_sum, DIM, BLOCK_M)


@triton.jit
def persistent_kernel(
    q, k, v, out, q_len, kv_len, scale, tiles,
    DIM: tl.constexpr, CAUSAL: tl.constexpr, MISTAKE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As many programs as the device runs at once, each with every n-th block."""
    blocks = tl.cdiv(q_len, BLOCK_M)
    last = tiles
    if MISTAKE == "last":
        # One whole round too few: what is left of the blocks after the last whole round is never computed.
        last = tiles // tl.num_programs(0) * tl.num_programs(0)
    for index in range(tl.program_id(0), last, tl.num_programs(0)):
        block, head = index % blocks, index // blocks
        end = kv_len
        if CAUSAL:
            end = tl.minimum(kv_len, (block + 1) * BLOCK_M)
        total, _, row_sum = tile(
            q, k, v, block, head, q_len, kv_len, 0, end, scale, DIM, BLOCK_M, BLOCK_N, CAUSAL, MISTAKE
        )  # fmt: skip
        written(out, block, head, q_len, total, row_sum, DIM, BLOCK_M)


@triton.jit
def split_kernel(
    q, k, v, sums, maxima, norms, q_len, kv_len, scale, split_len, heads,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of queries with one part of the keys: float32 sums (splits, heads, q_len, DIM), maxima and norms."""
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = split * split_len
    end = tl.minimum(kv_len, begin + split_len)
    total, row_max, row_sum = tile(
        q, k, v, block, head, q_len, kv_len, begin, end, scale, DIM, BLOCK_M, BLOCK_N, False, ""
    )  # fmt: skip
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (split * heads + head).to(tl.int64) * q_len
    at = first * DIM + rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(sums + at, total, mask=rows[:, None] < q_len)
    tl.store(maxima + first + rows, row_max, mask=rows < q_len)
    tl.store(norms + first + rows, row_sum, mask=rows < q_len)


@triton.jit
def combine_kernel(
    sums, maxima, norms, out, q_len, splits, heads,
    DIM: tl.constexpr, MISTAKE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a block of queries, each scaled to the largest maximum."""
    block, head = tl.program_id(0), tl.program_id(1)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < q_len
    total = tl.zeros([BLOCK_M, DIM], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for split in range(splits):
        first = (split * heads + head).to(tl.int64) * q_len
        part_max = tl.load(maxima + first + rows, mask=inside, other=0.0)
        part_sum = tl.load(norms + first + rows, mask=inside, other=1.0)
        at = first * DIM + rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
        part = tl.load(sums + at, mask=inside[:, None], other=0.0)
        new_max = tl.maximum(row_max, part_max)
        if MISTAKE == "equal":
            # As if all parts had the same maximum.
            before = tl.full([BLOCK_M], 1.0, tl.float32)
            now = before
        else:
            before, now = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
        total = total * before[:, None] + part * now[:, None]
        row_sum = row_sum * before + part_sum * now
        row_max = new_max
    written(out, block, head, q_len, total, row_sum, DIM, BLOCK_M)
