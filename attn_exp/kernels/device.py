"""What the forward and the backward kernels share on the device: tiles, masks and ranges of blocks.

Functions here are compiled by Triton, not by Python: a parameter in capitals is known at compile time, and branches on
it cost nothing at run time.
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
    """Rows `row` ... `row` + ROWS - 1 of one head, (ROWS, COLUMNS), zeros beyond `length` rows or DIM columns.

    `source` is a pointer, or with TMA a descriptor of the whole (batch, heads, length, dim) tensor, whose addresses
    and bounds Hopper's copy engine computes instead of the threads.
    """
    if TMA:
        tile = source.load([batch, head, row, 0]).reshape(ROWS, COLUMNS)
    else:
        # 64 bits: one tensor may have more than 2^31 elements, one tile never has.
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
def store_tile(
    tile,
    target,
    strides,
    batch,
    head,
    row,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
):
    """The reverse of `load_tile`, in the target's dtype."""
    first = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    first += tl.cast(row, tl.int64) * strides[2]
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    pointers = target + first + (rows * strides[2] + columns)
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=(row + rows < length) & (columns < DIM))


@triton.jit
def visible(queries, keys, kv_len, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether each query sees each key; the two broadcast against each other, in whichever order."""
    seen = keys < kv_len
    if CAUSAL:
        seen = seen & (keys <= queries + offset)
    if WINDOWED:
        seen = seen & (keys > queries + offset - window)
    return seen


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Hyperbolic tangent from the exponential; PRECISE keeps the relative error of float32 near 0 too.

    1 - 2 / (1 + e^2x) is exact at both ends (e^2x may overflow), but cancels near 0. The Taylor series takes over
    there: below 0.25 its first omitted term is under 1e-8 of x.
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
    """(begin, full_begin, full_end, end): the keys that a block of queries sees, and those that all of them see.

    Blocks of BLOCK_N keys start at multiples of BLOCK_N. Those from `full_begin` to `full_end` need no mask, those
    around them do, all others are hidden and skipped. AT_LEAST_ONE block is there if asked for, hidden or not: ptxas
    (CUDA 12.8) serializes some kernels' matrix products where the loop over the blocks may be empty, "due to non wgmma
    instructions defining accumulator registers", and others' where it may not.
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
    """(begin, end): the queries that see a block of keys, in blocks of BLOCK_M that start at multiples of BLOCK_M.

    At least one block, for the reason that `keys_of` gives, and inside the queries even if it is hidden.
    """
    last_key = tl.minimum(first_key + BLOCK_N, kv_len) - 1
    begin = 0
    end = q_len
    if CAUSAL:
        begin = tl.minimum(tl.maximum(first_key - offset, 0), q_len - 1) // BLOCK_M * BLOCK_M
    if WINDOWED:
        end = tl.minimum(q_len, last_key - offset + window)
    return begin, tl.maximum(end, begin + 1)
