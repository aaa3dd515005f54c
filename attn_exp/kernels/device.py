"""Device functions of the forward and backward kernels: tiles, masks and ranges of blocks.

Triton compiles the functions here. Parameters in capitals are compile-time constants, and branches on them cost nothing
at run time.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source,
    strides,
    batch,
    head,
    row,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load rows `row` to `row` + ROWS - 1 of one head, (ROWS, COLUMNS), with zeros beyond `length` rows or DIM columns.

    `source` is a pointer, or with TMA a descriptor of the whole (batch, heads, length, dim) tensor. Hopper's copy
    engine then computes addresses and bounds instead of the threads.
    """
    if TMA:
        tile = source.load([batch, head, row, 0]).reshape(ROWS, COLUMNS)
    else:
        # 64 bits: a tensor may have more than 2^31 elements, a tile never has.
        first = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
        first += tl.cast(row, tl.int64) * strides[2]
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, COLUMNS)[None, :]
        pointers = source + first + (rows * strides[2] + columns)
        if DIM < COLUMNS:
            tile = tl.load(pointers, mask=(row + rows < length) & (columns < DIM), other=0.0)
        else:
            tile = tl.load(pointers, mask=row + rows < length, other=0.0)
    return tile


@triton.jit
def load_keys(
    source,
    strides,
    slots,
    batch,
    head,
    row,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    TMA: tl.constexpr,
    PAGED: tl.constexpr,
):
    """Load keys or values as `load_tile` does, or with PAGED from their slots of a pool, `slots` (batch, length)."""
    if PAGED:
        rows = row + tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)[None, :]
        slot = tl.load(slots + tl.cast(batch, tl.int64) * length + rows, mask=rows < length, other=0)
        # 64 bits: a pool may have more than 2^31 elements.
        first = tl.cast(head, tl.int64) * strides[1] + slot.to(tl.int64)[:, None] * strides[2]
        tile = tl.load(source + first + columns, mask=(rows < length)[:, None] & (columns < DIM), other=0.0)
    else:
        tile = load_tile(source, strides, batch, head, row, length, ROWS, COLUMNS, DIM, TMA)
    return tile


@triton.jit
def store_tile(
    tile, target, strides, batch, head, row, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr
):
    """Store a tile in the target's dtype; the reverse of `load_tile`."""
    first = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    first += tl.cast(row, tl.int64) * strides[2]
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    pointers = target + first + (rows * strides[2] + columns)
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=(row + rows < length) & (columns < DIM))


@triton.jit
def visible(queries, keys, kv_len, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Return whether each query sees each key; the two broadcast in either order."""
    seen = keys < kv_len
    if CAUSAL:
        seen = seen & (keys <= queries + offset)
    if WINDOWED:
        seen = seen & (keys > queries + offset - window)
    return seen


@triton.jit
def within(keys, first, last):
    """Return whether keys lie within each query's bounds; all broadcast."""
    return (keys >= first) & (keys <= last)


@triton.jit
def added_log2(
    head,
    queries,
    keys,
    q_len,
    kv_len,
    slopes_log2,
    own_keys,
    bias,
    bias_strides,
    ALIBI: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Return what is added to the base-2 scores of a tile; queries and keys broadcast in either order."""
    total = 0.0
    if ALIBI:
        distance = tl.abs(tl.load(own_keys + queries) - keys).to(tl.float32)
        total -= tl.load(slopes_log2 + head) * distance
    if BIASED:
        # 64 bits: a bias may have more than 2^31 numbers.
        rows = tl.cast(head, tl.int64) * bias_strides[0] + queries.to(tl.int64) * bias_strides[1]
        numbers = tl.load(bias + rows + keys, mask=(queries < q_len) & (keys < kv_len), other=0.0)
        total += numbers.to(tl.float32) * 1.4426950408889634
    return total


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Compute the hyperbolic tangent from the exponential; PRECISE keeps float32's relative error near 0 too.

    1 - 2 / (1 + e^2x) is exact at both ends (e^2x may overflow), but cancels near 0. There the Taylor series is used:
    below 0.25 its first omitted term is under 1e-8 of x.
    """
    value = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    if PRECISE:
        y = x * x
        series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
        value = tl.where(tl.abs(x) < 0.25, series, value)
    return value


@triton.jit
def keys_of(
    first_query,
    q_len,
    kv_len,
    offset,
    window,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    AT_LEAST_ONE: tl.constexpr,
):
    """Return (begin, full_begin, full_end, end): which keys the queries of a block see.

    Some query sees the keys from `begin` to `end`, all queries see those from `full_begin` to `full_end`. Blocks of
    BLOCK_N keys start at multiples of BLOCK_N. Blocks between the full bounds need no mask, those around them do, and
    all others are hidden and skipped. AT_LEAST_ONE keeps one block even if it is hidden. If the loop over the blocks
    may be empty, ptxas (CUDA 12.8) serializes some kernels' matrix products, "due to non wgmma instructions defining
    accumulator registers", and others' if it may not.
    """
    last_query = tl.minimum(first_query + BLOCK_M, q_len) - 1
    begin = 0
    full_begin = 0
    end = kv_len
    full_end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, last_query + offset + 1)
        full_end = tl.maximum(tl.minimum(kv_len, first_query + offset + 1), 0)
    if WINDOWED:
        begin = tl.maximum(first_query + offset - window + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.maximum(last_query + offset - window + 1, 0)
    if AT_LEAST_ONE:
        end = tl.maximum(end, begin + 1)
    return begin, full_begin, full_end // BLOCK_N * BLOCK_N, end


@triton.jit
def queries_of(
    first_key,
    q_len,
    kv_len,
    offset,
    window,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Return (begin, end): the queries that see a block of keys.

    They come in blocks of BLOCK_M that start at multiples of BLOCK_M. There is at least one block, for the reason in
    `keys_of`, inside the queries even if it is hidden.
    """
    last_key = tl.minimum(first_key + BLOCK_N, kv_len) - 1
    begin = 0
    end = q_len
    if CAUSAL:
        begin = tl.minimum(tl.maximum(first_key - offset, 0), q_len - 1) // BLOCK_M * BLOCK_M
    if WINDOWED:
        end = tl.minimum(q_len, last_key - offset + window)
    return begin, tl.maximum(end, begin + 1)


@triton.jit
def bounded_keys(first, last, BLOCK_N: tl.constexpr, AT_LEAST_ONE: tl.constexpr):
    """Return what `keys_of` does from the first and the last key of each query of the block."""
    begin = tl.min(first, 0) // BLOCK_N * BLOCK_N
    end = tl.max(last, 0) + 1
    if AT_LEAST_ONE:
        end = tl.maximum(end, begin + 1)
    return begin, tl.max(first, 0), (tl.min(last, 0) + 1) // BLOCK_N * BLOCK_N, end


@triton.jit
def bounded_queries(first, last, BLOCK_M: tl.constexpr):
    """Return (begin, full_begin, full_end, end) from the first and the last query that sees each key of a block.

    All queries from `full_begin` to `full_end` see all of its keys. The bounds are multiples of BLOCK_M except `end`.
    There is at least one block, for the reason in `keys_of`.
    """
    begin = tl.min(first, 0) // BLOCK_M * BLOCK_M
    end = tl.maximum(tl.max(last, 0) + 1, begin + 1)
    full_begin = tl.minimum(tl.cdiv(tl.max(first, 0), BLOCK_M) * BLOCK_M, tl.cdiv(end, BLOCK_M) * BLOCK_M)
    full_begin = tl.maximum(full_begin, begin + BLOCK_M)
    full_end = tl.maximum((tl.min(last, 0) + 1) // BLOCK_M * BLOCK_M, full_begin)
    return begin, tl.minimum(full_begin, end), tl.minimum(full_end, end), end
