from hypothesis import strategies as st

from attn_exp.core.case.case import DTYPE_BYTES, E4M3, INT8, Case
from attn_exp.core.case.masks import KINDS

# Numbers by themselves; codes have tests of their own (test_quantised.py, test_int8.py).
NUMBER_DTYPES = sorted(DTYPE_BYTES.keys() - {E4M3, INT8})


@st.composite
def packed_cases(draw: st.DrawFn, *, longest: int = 12) -> Case:
    """Small cases of packed sequences: with as many keys as queries, or requests with more of them, or with neither."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    sizes = st.tuples(st.integers(0, longest), st.integers(0, longest))
    requests = draw(st.lists(sizes, min_size=1, max_size=5).filter(lambda drawn: any(queries for queries, _ in drawn)))
    ragged, causal = draw(st.booleans()), draw(st.booleans())
    lengths = tuple(queries for queries, _ in requests)
    # As many keys as queries are said by leaving kv_lengths out.
    ragged = ragged and any(more for _, more in requests)
    kv_lengths = tuple(queries + more for queries, more in requests) if ragged else None
    mask = draw(st.sampled_from([None, *KINDS])) if causal else None
    return Case(
        batch=1,
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        q_len=sum(lengths),
        kv_len=sum(kv_lengths or lengths),
        head_dim=draw(st.integers(1, 8)),
        value_dim=draw(st.integers(1, 8)),
        dtype="float32",
        causal=causal,
        lengths=lengths,
        kv_lengths=kv_lengths,
        **({} if mask is None else {mask: draw(st.integers(1, longest + 2))}),
    )


@st.composite
def cases(draw: st.DrawFn, *, longest: int = 24, largest_dim: int = 16, equal_dims: bool = False) -> Case:
    """Small cases of every kind: both alignments, q longer and shorter than kv, q of 1, grouped heads, two dims."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lengths = st.one_of(st.just(1), st.integers(1, longest))
    head_dim = draw(st.integers(1, largest_dim))
    causal = draw(st.booleans())
    mask = draw(st.sampled_from([None, *KINDS])) if causal else None
    masks = {} if mask is None else {mask: draw(st.integers(1, longest + 2))}
    return Case(
        batch=draw(st.integers(1, 3)),
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        q_len=draw(lengths),
        kv_len=draw(lengths),
        head_dim=head_dim,
        value_dim=head_dim if equal_dims else draw(st.integers(1, largest_dim)),
        dtype=draw(st.sampled_from(NUMBER_DTYPES)),
        causal=causal,
        align=draw(st.sampled_from(["bottom_right", "top_left"])),
        **masks,
    )
