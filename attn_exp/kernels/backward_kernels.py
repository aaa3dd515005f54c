"""The backward kernels as in FlashAttention-2 (arXiv:2307.08691, algorithm 2), without atomic additions.

The saved logarithm of each row's sum allows computing the weights p again, block by block. Then dv = pT dO, ds = p (dO
vT - delta) with delta = rowsum(dO out), dq = scale ds k and dk = scale dsT q. One kernel iterates over the queries and
sums dk and dv, another iterates over the keys and sums dq. Both compute q kT and dO vT. Every sum stays in registers
and has a fixed order, so the same inputs give bitwise identical gradients.
"""

import triton
import triton.language as tl

from attn_exp.kernels.device import (
    added_log2,
    bounded_keys,
    bounded_queries,
    keys_of,
    load_tile,
    queries_of,
    store_tile,
    tanh,
    visible,
    within,
)


@triton.jit(do_not_specialize=["q_len"])
def rows_kernel(
    out,
    d_out,
    lse_log2,
    padded_lse,
    padded_delta,
    out_strides,
    d_out_strides,
    q_heads,
    q_len,
    padded_len,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store what the other kernels need of each row: its lse, and delta = rowsum(dO out).

    Rows beyond `q_len` get inf and 0, so that they add nothing and need no further check.
    """
    blocks = padded_len // BLOCK_M
    first_query = tl.program_id(0) % blocks * BLOCK_M
    row = tl.program_id(0) // blocks
    head = row % q_heads
    batch = row // q_heads
    out_tile = load_tile(out, out_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_DV, VALUE_DIM, TMA=False)
    d_out_tile = load_tile(
        d_out, d_out_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_DV, VALUE_DIM, TMA=False
    )
    delta = tl.sum(out_tile.to(tl.float32) * d_out_tile.to(tl.float32), 1)
    queries = first_query + tl.arange(0, BLOCK_M)
    lse = tl.load(lse_log2 + row.to(tl.int64) * q_len + queries, mask=queries < q_len, other=float("inf"))
    padded = row.to(tl.int64) * padded_len + queries
    tl.store(padded_lse + padded, lse)
    tl.store(padded_delta + padded, delta)


@triton.jit
def _load_rows(source, row, padded_len, query, ROWS: tl.constexpr, TMA: tl.constexpr):
    """Load `ROWS` numbers from row `query` of one head, through a pointer or a descriptor of one dimension."""
    if TMA:
        numbers = source.load([row * padded_len + query])
    else:
        numbers = tl.load(source + tl.cast(row, tl.int64) * padded_len + query + tl.arange(0, ROWS))
    return numbers


@triton.jit(do_not_specialize=["q_len", "kv_len", "offset", "window", "bounds_len", "query_bounds_len", "sizes"])
def dkdv_kernel(
    q,
    k,
    v,
    d_out,
    lse_log2,
    delta,
    key_bounds,
    query_bounds,
    slopes_log2,
    own_keys,
    bias,
    dk,
    dv,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    dk_strides,
    dv_strides,
    bias_strides,
    kv_heads,
    q_len,
    kv_len,
    padded_len,
    scale,
    inner,
    outer,
    offset,
    window,
    bounds_len,
    query_bounds_len,
    sizes,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute dk and dv of one block of keys of one key-value head, summed over the queries of its group's heads.

    All tiles are transposed, (keys, queries). The tensor cores then produce pT and dsT in registers, where the next
    product needs its left operand. The left operands of the first two, k and v, stay for the whole loop. WANT_DK and
    WANT_DV allow leaving one sum out if both exceed the registers. Under a causal mask more queries see the first keys,
    so these come first. With BOUNDED, `query_bounds` has the first and, `query_bounds_len` numbers later, the last
    query that sees each key, as `key_bounds` has the keys of each query. With ALIBI and BIASED scores get what
    `added_log2` adds.
    """
    blocks = tl.cdiv(kv_len, BLOCK_N)
    first_key = tl.program_id(0) % blocks * BLOCK_N
    kv_head = tl.program_id(0) // blocks % kv_heads
    batch = tl.program_id(0) // blocks // kv_heads
    keys = first_key + tl.arange(0, BLOCK_N)
    PARTS: tl.constexpr = 3 if BOUNDED else 2 if CAUSAL and not WINDOWED else 1
    if BOUNDED:
        first_query = tl.load(query_bounds + keys)
        last_query = tl.load(query_bounds + query_bounds_len + keys)
        begin, masked_end, full_end, end = bounded_queries(first_query, last_query, BLOCK_M)
    else:
        begin, end = queries_of(first_key, q_len, kv_len, offset, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED)
        masked_end = end
        if PARTS == 2:
            # From here on every query sees all keys of the block.
            masked_end = tl.cdiv(tl.maximum(first_key + BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M
            masked_end = tl.minimum(tl.maximum(masked_end, begin + BLOCK_M), end)
        full_end = end
    k_tile = load_tile(k, k_strides, batch, kv_head, first_key, kv_len, BLOCK_N, BLOCK_D, DIM, TMA)
    if WANT_DK:
        v_tile = load_tile(v, v_strides, batch, kv_head, first_key, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM, TMA)
    else:
        v_tile = k_tile
    factor = outer
    if ALIBI or BIASED:
        factor = 1.0
    dk_total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_total = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        row = batch * kv_heads * GROUP + head
        # Blocks that need no mask have a loop of their own: a branch would make the compiler serialize the products.
        for part in tl.static_range(PARTS):
            part_begin = begin if part == 0 else masked_end if part == 1 else full_end
            part_end = masked_end if part == 0 else full_end if part == 1 else end
            for query in tl.range(part_begin, part_end, BLOCK_M):
                q_tile = load_tile(q, q_strides, batch, head, query, q_len, BLOCK_M, BLOCK_D, DIM, TMA)
                row_lse = _load_rows(lse_log2, row, padded_len, query, BLOCK_M, TMA)
                scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
                if SOFTCAPPED:
                    scores = tanh(scores * inner, PRECISE=k_tile.dtype == tl.float32)
                shown = scores
                if ALIBI or BIASED:
                    shown = scores * outer + added_log2(
                        head,
                        (query + tl.arange(0, BLOCK_M))[None, :],
                        keys[:, None],
                        q_len,
                        kv_len,
                        slopes_log2,
                        own_keys,
                        bias,
                        bias_strides,
                        ALIBI,
                        BIASED,
                    )
                if BOUNDED and part != 1:
                    bounds = key_bounds + query + tl.arange(0, BLOCK_M)
                    first, last = tl.load(bounds), tl.load(bounds + bounds_len)
                    seen = within(keys[:, None], first[None, :], last[None, :])
                    shown = tl.where(seen, shown, -float("inf"))
                if CAUSAL and part == 0:
                    queries = query + tl.arange(0, BLOCK_M)
                    seen = visible(queries[None, :], keys[:, None], kv_len, offset, window, CAUSAL, WINDOWED)
                    shown = tl.where(seen, shown, -float("inf"))
                weights = tl.exp2(shown * factor - row_lse[None, :])
                d_out_tile = load_tile(
                    d_out, d_out_strides, batch, head, query, q_len, BLOCK_M, BLOCK_DV, VALUE_DIM, TMA
                )
                if WANT_DV:
                    dv_total = tl.dot(weights.to(k_tile.dtype), d_out_tile, dv_total, input_precision="ieee")
                if WANT_DK:
                    row_delta = _load_rows(delta, row, padded_len, query, BLOCK_M, TMA)
                    d_weights = tl.dot(v_tile, tl.trans(d_out_tile), input_precision="ieee")
                    d_scores = weights * (d_weights - row_delta[None, :])
                    if SOFTCAPPED:
                        d_scores = d_scores * (1.0 - scores * scores)
                    dk_total = tl.dot(d_scores.to(k_tile.dtype), q_tile, dk_total, input_precision="ieee")
    if WANT_DK:
        store_tile(dk_total * scale, dk, dk_strides, batch, kv_head, first_key, kv_len, BLOCK_N, BLOCK_D, DIM)
    if WANT_DV:
        store_tile(dv_total, dv, dv_strides, batch, kv_head, first_key, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM)


@triton.jit(do_not_specialize=["q_len", "kv_len", "offset", "window", "bounds_len", "sizes"])
def dq_kernel(
    q,
    k,
    v,
    d_out,
    lse_log2,
    delta,
    key_bounds,
    slopes_log2,
    own_keys,
    bias,
    dq,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    dq_strides,
    bias_strides,
    q_heads,
    q_len,
    kv_len,
    padded_len,
    scale,
    inner,
    outer,
    offset,
    window,
    bounds_len,
    sizes,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute dq of one block of queries of one head; blocks have the forward kernel's order."""
    blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % q_heads
    batch = tl.program_id(0) // blocks // q_heads
    kv_head = head // GROUP
    if CAUSAL:
        block = blocks - 1 - block
    first_query = block * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    if BOUNDED:
        first = tl.load(key_bounds + queries)
        last = tl.load(key_bounds + bounds_len + queries)
        begin, full_begin, full_end, end = bounded_keys(first, last, BLOCK_N, True)
    else:
        begin, full_begin, full_end, end = keys_of(
            first_query, q_len, kv_len, offset, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, True
        )
    q_tile = load_tile(q, q_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_D, DIM, TMA)
    d_out_tile = load_tile(d_out, d_out_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_DV, VALUE_DIM, TMA)
    row = (tl.program_id(0) // blocks).to(tl.int64) * padded_len
    row_lse = tl.load(lse_log2 + row + queries)
    row_delta = tl.load(delta + row + queries)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    factor = outer
    if ALIBI or BIASED:
        factor = 1.0
    for key in tl.range(begin, end, BLOCK_N):
        k_tile = load_tile(k, k_strides, batch, kv_head, key, kv_len, BLOCK_N, BLOCK_D, DIM, TMA)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if SOFTCAPPED:
            scores = tanh(scores * inner, PRECISE=q_tile.dtype == tl.float32)
        shown = scores
        if ALIBI or BIASED:
            shown = scores * outer + added_log2(
                head,
                queries[:, None],
                (key + tl.arange(0, BLOCK_N))[None, :],
                q_len,
                kv_len,
                slopes_log2,
                own_keys,
                bias,
                bias_strides,
                ALIBI,
                BIASED,
            )
        if (key < full_begin) | (key >= full_end):
            keys = key + tl.arange(0, BLOCK_N)
            if BOUNDED:
                seen = within(keys[None, :], first[:, None], last[:, None])
            else:
                seen = visible(queries[:, None], keys[None, :], kv_len, offset, window, CAUSAL, WINDOWED)
            shown = tl.where(seen, shown, -float("inf"))
        weights = tl.exp2(shown * factor - row_lse[:, None])
        v_tile = load_tile(v, v_strides, batch, kv_head, key, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM, TMA)
        d_weights = tl.dot(d_out_tile, tl.trans(v_tile), input_precision="ieee")
        d_scores = weights * (d_weights - row_delta[:, None])
        if SOFTCAPPED:
            d_scores = d_scores * (1.0 - scores * scores)
        total = tl.dot(d_scores.to(q_tile.dtype), k_tile, total, input_precision="ieee")
    store_tile(total * scale, dq, dq_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_D, DIM)
