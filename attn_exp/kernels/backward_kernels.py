"""The backward kernels, FlashAttention-2's way (arXiv:2307.08691, algorithm 2), without atomic additions.

With the saved logarithm of each row's sum the weights p are computed again, block by block. Then dv = pT dO,
ds = p (dO vT - delta) with delta = rowsum(dO out), dq = scale ds k and dk = scale dsT q. One kernel walks over the
queries and sums dk and dv, another walks over the keys and sums dq: q kT and dO vT are computed twice, but every sum
stays in registers and has one order, so the same inputs give the same gradients, bit by bit.
"""

import triton
import triton.language as tl

from attn_exp.kernels.device import key_ranges, load_tile, query_ranges, store_tile, tanh, visible


@triton.jit(do_not_specialize=["q_len"])
def delta_kernel(
    out,
    d_out,
    delta,
    out_strides,
    d_out_strides,
    q_heads,
    q_len,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta = rowsum(dO out), which both backward kernels subtract from dO vT."""
    blocks = tl.cdiv(q_len, BLOCK_M)
    first_query = tl.program_id(0) % blocks * BLOCK_M
    head = tl.program_id(0) // blocks % q_heads
    batch = tl.program_id(0) // blocks // q_heads
    out_tile = load_tile(
        out, out_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_DV, VALUE_DIM, True, TMA=False
    )
    d_out_tile = load_tile(
        d_out, d_out_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_DV, VALUE_DIM, True, TMA=False
    )
    sums = tl.sum(out_tile.to(tl.float32) * d_out_tile.to(tl.float32), 1)
    queries = first_query + tl.arange(0, BLOCK_M)
    row = (tl.program_id(0) // blocks).to(tl.int64) * q_len
    tl.store(delta + row + queries, sums, mask=queries < q_len)


@triton.jit
def _gather_queries(
    dk,
    dv,
    k_tile,
    v_tile,
    q,
    d_out,
    lse_log2,
    delta,
    q_strides,
    d_out_strides,
    batch,
    head,
    keys,
    begin,
    end,
    q_len,
    kv_len,
    inner,
    outer,
    offset,
    window,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
):
    """Add what queries `begin` ... `end` - 1 of one head give to a block of keys' dk and dv.

    Everything is transposed, (keys, queries): pT and dsT come out of the tensor cores where the next product needs its
    left operand, in registers, and k and v, the left operands of the first two, stay for the whole loop.
    Only q, d_out, lse and delta rows beyond `q_len` need care: with lse = inf their weights are 0.
    """
    for query in tl.range(begin, end, BLOCK_M, warp_specialize=WARP_SPECIALIZE):
        queries = query + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, q_strides, batch, head, query, q_len, BLOCK_M, BLOCK_D, DIM, MASKED, TMA)
        if MASKED:
            row_lse = tl.load(lse_log2 + queries, mask=queries < q_len, other=float("inf"))
        else:
            row_lse = tl.load(lse_log2 + queries)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        if SOFTCAPPED:
            scores = tanh(scores * inner, PRECISE=k_tile.dtype == tl.float32)
        weights = tl.exp2(scores * outer - row_lse[None, :])
        if MASKED:
            seen = visible(queries[None, :], keys[:, None], kv_len, offset, window, CAUSAL, WINDOWED)
            weights = tl.where(seen, weights, 0.0)
        d_out_tile = load_tile(
            d_out, d_out_strides, batch, head, query, q_len, BLOCK_M, BLOCK_DV, VALUE_DIM, MASKED, TMA
        )
        if WANT_DV:
            dv = tl.dot(weights.to(k_tile.dtype), d_out_tile, dv, input_precision="ieee")
        if WANT_DK:
            if MASKED:
                row_delta = tl.load(delta + queries, mask=queries < q_len, other=0.0)
            else:
                row_delta = tl.load(delta + queries)
            d_weights = tl.dot(v_tile, tl.trans(d_out_tile), input_precision="ieee")
            d_scores = weights * (d_weights - row_delta[None, :])
            if SOFTCAPPED:
                d_scores = d_scores * (1.0 - scores * scores)
            dk = tl.dot(d_scores.to(k_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["q_len", "kv_len", "offset", "window", "bucket"])
def dkdv_kernel(
    q,
    k,
    v,
    d_out,
    lse_log2,
    delta,
    dk,
    dv,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    dk_strides,
    dv_strides,
    kv_heads,
    q_len,
    kv_len,
    scale,
    inner,
    outer,
    offset,
    window,
    bucket,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """dk and dv of one block of keys of one key-value head, summed over the queries of all heads of its group.

    Under a causal mask the first keys are seen most, and they come first.
    """
    blocks = tl.cdiv(kv_len, BLOCK_N)
    first_key = tl.program_id(0) % blocks * BLOCK_N
    kv_head = tl.program_id(0) // blocks % kv_heads
    batch = tl.program_id(0) // blocks // kv_heads
    keys = first_key + tl.arange(0, BLOCK_N)
    begin, full_begin, full_end, end = query_ranges(
        first_key, q_len, kv_len, offset, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED
    )
    k_tile = load_tile(k, k_strides, batch, kv_head, first_key, kv_len, BLOCK_N, BLOCK_D, DIM, True, TMA)
    if WANT_DK:
        v_tile = load_tile(v, v_strides, batch, kv_head, first_key, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM, True, TMA)
    else:
        v_tile = k_tile
    dk_total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_total = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        row = (batch * kv_heads * GROUP + head).to(tl.int64) * q_len
        # The causal edge, the queries that see all these keys, the window's edge or the last queries.
        for part in tl.static_range(0 if CAUSAL else 1, 3):
            dk_total, dv_total = _gather_queries(
                dk_total,
                dv_total,
                k_tile,
                v_tile,
                q,
                d_out,
                lse_log2 + row,
                delta + row,
                q_strides,
                d_out_strides,
                batch,
                head,
                keys,
                begin if part == 0 else (full_begin if part == 1 else full_end),
                full_begin if part == 0 else (full_end if part == 1 else end),
                q_len,
                kv_len,
                inner,
                outer,
                offset,
                window,
                DIM,
                VALUE_DIM,
                CAUSAL,
                WINDOWED,
                SOFTCAPPED,
                part != 1,
                BLOCK_M,
                BLOCK_D,
                BLOCK_DV,
                TMA,
                WARP_SPECIALIZE,
                WANT_DK,
                WANT_DV,
            )
    if WANT_DK:
        store_tile(dk_total * scale, dk, dk_strides, batch, kv_head, first_key, kv_len, BLOCK_N, BLOCK_D, DIM)
    if WANT_DV:
        store_tile(dv_total, dv, dv_strides, batch, kv_head, first_key, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM)


@triton.jit
def _gather_keys(
    dq,
    q_tile,
    d_out_tile,
    row_lse,
    row_delta,
    k,
    v,
    k_strides,
    v_strides,
    batch,
    kv_head,
    queries,
    begin,
    end,
    kv_len,
    inner,
    outer,
    offset,
    window,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """Add what keys `begin` ... `end` - 1 give to a block of queries' dq."""
    for key in tl.range(begin, end, BLOCK_N, warp_specialize=WARP_SPECIALIZE):
        k_tile = load_tile(k, k_strides, batch, kv_head, key, kv_len, BLOCK_N, BLOCK_D, DIM, MASKED, TMA)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if SOFTCAPPED:
            scores = tanh(scores * inner, PRECISE=q_tile.dtype == tl.float32)
        weights = tl.exp2(scores * outer - row_lse[:, None])
        if MASKED:
            keys = key + tl.arange(0, BLOCK_N)
            seen = visible(queries[:, None], keys[None, :], kv_len, offset, window, CAUSAL, WINDOWED)
            weights = tl.where(seen, weights, 0.0)
        v_tile = load_tile(v, v_strides, batch, kv_head, key, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM, MASKED, TMA)
        d_weights = tl.dot(d_out_tile, tl.trans(v_tile), input_precision="ieee")
        d_scores = weights * (d_weights - row_delta[:, None])
        if SOFTCAPPED:
            d_scores = d_scores * (1.0 - scores * scores)
        dq = tl.dot(d_scores.to(q_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["q_len", "kv_len", "offset", "window", "bucket"])
def dq_kernel(
    q,
    k,
    v,
    d_out,
    lse_log2,
    delta,
    dq,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    dq_strides,
    q_heads,
    q_len,
    kv_len,
    scale,
    inner,
    outer,
    offset,
    window,
    bucket,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    """dq of one block of queries of one head; blocks in the forward kernel's order."""
    blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % q_heads
    batch = tl.program_id(0) // blocks // q_heads
    if CAUSAL:
        block = blocks - 1 - block
    first_query = block * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    begin, full_begin, full_end, end = key_ranges(
        first_query, q_len, kv_len, offset, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED
    )
    q_tile = load_tile(q, q_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_D, DIM, True, TMA)
    d_out_tile = load_tile(
        d_out, d_out_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_DV, VALUE_DIM, True, TMA
    )
    row = (tl.program_id(0) // blocks).to(tl.int64) * q_len
    row_lse = tl.load(lse_log2 + row + queries, mask=queries < q_len, other=float("inf"))
    row_delta = tl.load(delta + row + queries, mask=queries < q_len, other=0.0)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        total = _gather_keys(
            total,
            q_tile,
            d_out_tile,
            row_lse,
            row_delta,
            k,
            v,
            k_strides,
            v_strides,
            batch,
            head // GROUP,
            queries,
            begin if part == 0 else (full_begin if part == 1 else full_end),
            full_begin if part == 0 else (full_end if part == 1 else end),
            kv_len,
            inner,
            outer,
            offset,
            window,
            DIM,
            VALUE_DIM,
            CAUSAL,
            WINDOWED,
            SOFTCAPPED,
            part != 1,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            TMA,
            WARP_SPECIALIZE,
        )
    store_tile(total * scale, dq, dq_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_D, DIM)
