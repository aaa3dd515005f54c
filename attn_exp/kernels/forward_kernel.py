"""The forward kernel: one program computes one block of queries of one head, as in FlashAttention-2.

It is FlashAttention-2 (arXiv:2307.08691, algorithm 1) with the online softmax of Milakov and Gimelshein
(arXiv:1805.02867). The scores of a block of keys live only in registers; when a block raises a row's maximum, the sums
so far are scaled down. Exponents are base 2, for which the hardware has an instruction; log2(e) is folded into the
factor of the scores. Triton's tutorial 06 ("Fused Attention") is the same algorithm for equal lengths and heads.
"""

import triton
import triton.language as tl

from attn_exp.kernels.device import (
    added_log2,
    bounded_keys,
    keys_of,
    load_keys,
    load_tile,
    store_tile,
    tanh,
    visible,
    within,
)


@triton.jit(do_not_specialize=["q_len", "kv_len", "offset", "window", "bounds_len", "sizes"])
def forward_kernel(
    q,
    k,
    v,
    out,
    lse_log2,
    key_bounds,
    slots,
    sinks_log2,
    slopes_log2,
    own_keys,
    bias,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    bias_strides,
    q_heads,
    q_len,
    kv_len,
    inner,
    outer,
    offset,
    window,
    bounds_len,
    v_scale,
    sizes,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    BIASED: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `out` and the base-2 logarithm of each row's sum of exponentials, +inf for a row that sees no key.

    Scores in base 2 are `outer` * q kT, or with SOFTCAPPED `outer` * tanh(`inner` * q kT). `sizes` only distinguishes
    cases for the autotuner. With BOUNDED, `key_bounds` has the first and, `bounds_len` numbers later, the last key of
    each query, for as many queries as blocks have. With SINKS, `sinks_log2` has a logit of each head in base 2, which
    every row begins with, as with a key that has no value. With ALIBI and BIASED the scores get what `added_log2` adds.
    `v_scale` is a factor of the values. With PAGED keys and values are in a pool (1, kv_heads, slots, dim), and `slots`
    (batch, kv_len) has where each is.

    OVERLAP delays each block's product with v until the next block's scores are computed. The tensor cores work on it
    while the exponentials are computed (FlashAttention-3, arXiv:2407.08608, section 3.2).
    """
    blocks = tl.cdiv(q_len, BLOCK_M)
    # Blocks of one head run next to each other and share its keys in L2.
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % q_heads
    batch = tl.program_id(0) // blocks // q_heads
    kv_head = head // GROUP
    if CAUSAL:
        # The last queries see most keys: starting with them leaves the short blocks for the end.
        block = blocks - 1 - block
    first_query = block * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    if BOUNDED:
        first = tl.load(key_bounds + queries)
        last = tl.load(key_bounds + bounds_len + queries)
        begin, full_begin, full_end, end = bounded_keys(first, last, BLOCK_N, not OVERLAP)
    else:
        begin, full_begin, full_end, end = keys_of(
            first_query, q_len, kv_len, offset, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, not OVERLAP
        )
    q_tile = load_tile(q, q_strides, batch, head, first_query, q_len, BLOCK_M, BLOCK_D, DIM, TMA)
    total = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if SINKS:
        row_max = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_log2 + head)
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    factor = outer
    if ALIBI or BIASED:
        factor = 1.0
    # Weights of the previous block, as integers: Triton would move known 16-bit floats to shared memory.
    pending = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if q_tile.dtype == tl.float32 else tl.int16)
    pending_rescale = tl.full([BLOCK_M], 1.0, tl.float32)
    # Not with warp_specialize=True: Triton 3.6 compiles that for Hopper, and the kernel hangs.
    for key in tl.range(begin, end, BLOCK_N):
        k_tile = load_keys(k, k_strides, slots, batch, kv_head, key, kv_len, BLOCK_N, BLOCK_D, DIM, TMA, PAGED)
        # No change but for codes of an fp8 cache.
        scores = tl.dot(q_tile, tl.trans(k_tile.to(q_tile.dtype)), input_precision="ieee")
        if SOFTCAPPED:
            scores = tanh(scores * inner, PRECISE=q_tile.dtype == tl.float32)
        if ALIBI or BIASED:
            scores = scores * outer + added_log2(
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
            scores = tl.where(seen, scores, -float("inf"))
        if OVERLAP:
            # In the first iteration the pending weights are 0, so any keys do.
            before = tl.maximum(key - BLOCK_N, begin)
            v_tile = load_keys(
                v, v_strides, slots, batch, kv_head, before, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM, TMA, PAGED
            )
            weights_before = pending.to(q_tile.dtype, bitcast=True)
            total = tl.dot(
                weights_before, v_tile.to(q_tile.dtype), total * pending_rescale[:, None], input_precision="ieee"
            )
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        # Until a row sees a key its maximum is -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores * factor - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        if OVERLAP:
            pending = weights.to(q_tile.dtype).to(pending.dtype, bitcast=True)
            pending_rescale = rescale
        else:
            v_tile = load_keys(
                v, v_strides, slots, batch, kv_head, key, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM, TMA, PAGED
            )
            total = tl.dot(
                weights.to(q_tile.dtype), v_tile.to(q_tile.dtype), total * rescale[:, None], input_precision="ieee"
            )
    if OVERLAP:
        last_block = begin + tl.maximum(end - 1 - begin, 0) // BLOCK_N * BLOCK_N
        v_tile = load_keys(
            v, v_strides, slots, batch, kv_head, last_block, kv_len, BLOCK_N, BLOCK_DV, VALUE_DIM, TMA, PAGED
        )
        weights_before = pending.to(q_tile.dtype, bitcast=True)
        total = tl.dot(
            weights_before, v_tile.to(q_tile.dtype), total * pending_rescale[:, None], input_precision="ieee"
        )
    blind = row_sum == 0.0
    row_sum = tl.where(blind, 1.0, row_sum)
    store_tile(
        total * (v_scale / row_sum)[:, None],
        out,
        out_strides,
        batch,
        head,
        first_query,
        q_len,
        BLOCK_M,
        BLOCK_DV,
        VALUE_DIM,
    )
    # +inf, as FlashAttention-2 stores it: the backward pass's exp2(score - lse) is then 0 without a test.
    lse = tl.where(blind, float("inf"), row_max + tl.log2(row_sum))
    first_row = (tl.program_id(0) // blocks).to(tl.int64) * q_len
    tl.store(lse_log2 + first_row + queries, lse, mask=queries < q_len)
