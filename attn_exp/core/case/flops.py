"""FLOPs and compulsory bytes of a case, in closed form (convention `exact_mask`)."""

from dataclasses import replace

from attn_exp.core.case.case import DTYPE_BYTES, HALVES, Case

CONVENTION = "exact_mask"
# A pass's work by the other conventions, relative to the forward's.
_OF_FORWARD = {"forward": 1.0, "backward": 2.5, "step": 3.5}


def unmasked_pairs(case: Case) -> int:
    """Return the number of (query, key) pairs of one head that the mask does not hide.

    A query that sees no key (causal, bottom-right, q_len > kv_len) counts nothing.
    """
    if case.lengths is not None:
        return sum(unmasked_pairs(one) for one in _sequences(case))
    first, end = case.mask.first, case.mask.end
    of_queries = case.offset, case.offset + case.q_len, case.kv_len
    seen = case.q_len * case.kv_len if end is None else end.total(*of_queries)
    return seen if first is None else seen - first.total(*of_queries)


def seen_keys(case: Case) -> int:
    """Return how many keys at least one query sees."""
    if case.lengths is not None:
        return sum(seen_keys(one) for one in _sequences(case))
    return len(_seen_range(case))


def seen_pages(case: Case, page_size: int) -> int:
    """Return how many pages of a row of the batch have a key that at least one query sees."""
    if case.lengths is not None:
        return sum(seen_pages(one, page_size) for one in _sequences(case))
    seen = _seen_range(case)
    return seen[-1] // page_size - seen[0] // page_size + 1 if seen else 0


def keys_read_again(case: Case) -> int:
    """Return how many keys in shared pages are read again, by one request after another has read them."""
    if not case.shared_keys:
        return 0
    requests = [case] * case.batch if case.lengths is None else _sequences(case)
    seen = [range(case.shared_keys)[own.start : own.stop] for own in map(_seen_range, requests)]
    return sum(map(len, seen)) - len(set().union(*seen))


def _seen_range(case: Case) -> range:
    """Return the keys of one sequence that at least one query sees."""
    first, end = case.mask.first, case.mask.end
    return range(
        0 if first is None else max(0, first.at(case.offset)),
        case.kv_len if end is None else max(0, min(case.kv_len, end.at(case.offset + case.q_len - 1))),
    )


def _sequences(case: Case) -> list[Case]:
    """Return the sequences of a packed case that have queries, each as a case of its own."""
    lengths = case.lengths or ()
    whole = replace(case, lengths=None, kv_lengths=None)
    return [
        replace(whole, q_len=queries, kv_len=keys)
        for queries, keys in zip(lengths, case.kv_lengths or lengths, strict=True)
        if queries
    ]


def flops(case: Case, direction: str) -> int:
    """Return the floating-point operations of the matrix products of one pass, `forward`, `backward` or `step`.

    Forward has two (q kT, p v). Backward has five, one of them recomputed (FlashAttention, arXiv:2205.14135, appendix
    B). A step has both. Softmax, scale and mask do not count. Grouped heads save bytes, not operations: q_heads counts.
    """
    if direction == "step":
        return sum(flops(case, half) for half in HALVES)
    pairs = case.batch * case.q_heads * unmasked_pairs(case)
    if direction == "forward":
        return 2 * pairs * (case.head_dim + case.value_dim)
    return 2 * pairs * (3 * case.head_dim + 2 * case.value_dim)


def flops_sdpa_convention(case: Case, direction: str) -> float:
    """Return the FLOPs as PyTorch's attention benchmark counts them (benchmarks/transformer/sdpa.py).

    4 M N D and 2 M N for the softmax, halved under a causal mask, times 2.5 for the backward and 3.5 for both.
    """
    per_head = 2 * case.q_len * case.kv_len * (case.head_dim + case.value_dim + 1)
    total = case.batch * case.q_heads * per_head * (0.5 if case.causal else 1.0)
    return total * _OF_FORWARD[direction]


def flops_common_convention(case: Case, direction: str) -> float:
    """Return the FLOPs as most published figures count them (flash-attention's and cuDNN frontend's benchmarks).

    Only matrix products: 4 M N D for each head (2 M N (d_qk + d_v)), exactly half under a causal mask, times 2.5 for
    the backward.
    """
    total = case.batch * case.q_heads * 2 * case.q_len * case.kv_len * (case.head_dim + case.value_dim)
    return total * (0.5 if case.causal else 1.0) * _OF_FORWARD[direction]


def compulsory_bytes(case: Case, direction: str, *, saves_lse: bool) -> int:
    """Return the bytes that one pass must move: every input read once, every output written once.

    Forward reads q, k, v and writes the output, and the float32 log-sum-exp if a backward will need it (`saves_lse`).
    Backward reads q, k, v, output, output gradient and log-sum-exp and writes dq, dk, dv. A step does not have to read
    what it wrote: it reads q, k, v and the output's gradient, and writes the output, dq, dk and dv. Sinks are read once
    in each, and their gradients written in a backward; so are the numbers of a bias for visible pairs. ALiBi follows
    from indices. Latent keys are their values, too, and count once. A paged cache adds the block table's entries, and
    pages that requests share count once.
    """
    size = DTYPE_BYTES[case.dtype]
    if case.sink:
        # One number a head, and its gradient.
        sinks = size * case.q_heads * (1 if direction == "forward" else 2)
        return sinks + compulsory_bytes(replace(case, sink=False), direction, saves_lse=saves_lse)
    if case.page_size is not None:
        # The block table has 32 bits for each page.
        table = 4 * case.batch * seen_pages(case, case.page_size)
        once = case.batch * seen_keys(case) - keys_read_again(case)
        # Instead of those of a contiguous cache.
        bytes_of_key = case.kv_heads * case.kv_dims * (1 if case.cache_dtype else size)
        other = size * case.batch * case.kv_heads * seen_keys(case) * case.kv_dims
        without = compulsory_bytes(replace(case, page_size=None), direction, saves_lse=saves_lse)
        return table + bytes_of_key * once - other + without
    if case.bias is not None:
        numbers = unmasked_pairs(case) * case.bias_heads
        return size * numbers + compulsory_bytes(replace(case, bias=None), direction, saves_lse=saves_lse)
    q_side = case.batch * case.q_heads * case.q_len * (case.head_dim + case.value_dim)
    kv_read = case.batch * case.kv_heads * seen_keys(case) * case.kv_dims
    kv_written = case.batch * case.kv_heads * case.kv_len * case.kv_dims
    lse = 4 * case.batch * case.q_heads * case.q_len
    if direction == "forward":
        return size * (q_side + kv_read) + (lse if saves_lse else 0)
    if direction == "step":
        return size * (2 * q_side + kv_read + kv_written)
    return size * (2 * q_side + kv_read + kv_written) + lse
