from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from strategies import cases, packed_cases

from attn_exp.attention.formula import hidden_keys
from attn_exp.core.case.case import DTYPE_BYTES, Case
from attn_exp.core.case.flops import compulsory_bytes, flops, flops_sdpa_convention, seen_keys, unmasked_pairs
from attn_exp.core.case.masks import NO_NUMBER

SQUARE = Case(
    batch=2, q_heads=16, kv_heads=16, q_len=1024, kv_len=1024, head_dim=128, value_dim=128, dtype="bfloat16"
)  # fmt: skip


def visible(case: Case) -> np.ndarray:
    """The mask, pair by pair, from the definition in `Case`."""
    mask = np.ones((case.q_len, case.kv_len), dtype=bool)
    if case.causal:
        for row in range(case.q_len):
            for key in range(case.kv_len):
                if case.align == "top_left":
                    mask[row, key] = key <= row
                else:
                    # The last query sees the last key, and each query before it one key fewer.
                    mask[row, key] = case.kv_len - 1 - key >= case.q_len - 1 - row
                own = row if case.align == "top_left" else row + case.kv_len - case.q_len
                if case.window is not None:
                    mask[row, key] &= own - key < case.window
                if case.prefix is not None:
                    mask[row, key] |= key < case.prefix
                if case.chunk is not None:
                    mask[row, key] &= own // case.chunk == key // case.chunk
                if case.block is not None:
                    mask[row, key] = key // case.block <= own // case.block
    return mask


def visible_of_packed(case: Case) -> np.ndarray:
    """The masks of the sequences by themselves, in their places."""
    mask = np.zeros((case.q_len, case.kv_len), dtype=bool)
    row = key = 0
    for queries, keys in zip(case.lengths, case.kv_lengths or case.lengths, strict=True):
        if queries:
            own = replace(case, lengths=None, kv_lengths=None, q_len=queries, kv_len=keys)
            mask[row : row + queries, key : key + keys] = visible(own)
        row, key = row + queries, key + keys
    return mask


def bytes_of(case: Case, direction: str) -> int:
    return compulsory_bytes(case, direction, saves_lse=True)


@settings(max_examples=100)
@given(cases())
def test_pairs_equal_a_count_of_the_mask(case):
    assert unmasked_pairs(case) == visible(case).sum()


@settings(max_examples=100)
@given(cases())
def test_seen_keys_equal_the_columns_of_the_mask_that_are_not_empty(case):
    assert seen_keys(case) == visible(case).any(axis=0).sum()


@settings(max_examples=100)
@given(packed_cases())
def test_packed_sequences_and_requests_have_the_masks_of_each(case):
    mask = visible_of_packed(case)
    assert unmasked_pairs(case) == mask.sum()
    assert seen_keys(case) == mask.any(axis=0).sum()
    assert np.array_equal(~hidden_keys(case, 0, case.q_len, torch.device("cpu")).numpy(), mask)


@settings(max_examples=100)
@given(cases(longest=10, largest_dim=6))
def test_flops_equal_a_count_of_multiplications_and_additions(case):
    pairs = case.batch * case.q_heads * int(visible(case).sum())
    over_head_dim, over_value_dim = 2 * pairs * case.head_dim, 2 * pairs * case.value_dim
    assert flops(case, "forward") == over_head_dim + over_value_dim  # q kT, p v
    assert flops(case, "backward") == 3 * over_head_dim + 2 * over_value_dim  # q kT again, ds k, dsT q; pT dO, dO vT


def test_sdpa_convention_is_that_of_pytorchs_benchmark():
    # benchmarks/transformer/sdpa.py: 2MND for each product, 2MN for the softmax, halved if causal, 2.5x backward
    m = n = 1024
    forward = 2 * 16 * (2 * m * n * 128 + 2 * m * n * 128 + 2 * m * n)
    assert flops_sdpa_convention(SQUARE, "forward") == forward
    assert flops_sdpa_convention(replace(SQUARE, causal=True), "backward") == 2.5 * forward / 2


@given(cases())
def test_bytes_of_an_unmasked_case_are_those_of_its_tensors(case):
    case = replace(case, causal=False, **NO_NUMBER)
    rows = case.batch * case.q_heads * case.q_len
    q, out = np.array([case.head_dim, case.value_dim]) * rows * DTYPE_BYTES[case.dtype]
    keys = case.batch * case.kv_heads * case.kv_len
    k, v = np.array([case.head_dim, case.value_dim]) * keys * DTYPE_BYTES[case.dtype]
    assert compulsory_bytes(case, "forward", saves_lse=False) == q + k + v + out
    assert compulsory_bytes(case, "forward", saves_lse=True) == q + k + v + out + 4 * rows
    # q k v out d_out lse in; dq dk dv out
    assert compulsory_bytes(case, "backward", saves_lse=True) == (q + k + v + out + out + 4 * rows) + (q + k + v)


def test_keys_that_no_query_sees_need_not_be_read():
    # Top-left with one query: key 0 alone is read, so a longer cache costs nothing and must not become `implausible`.
    short = replace(SQUARE, q_len=1, kv_len=1, causal=True, align="top_left")
    assert bytes_of(replace(short, kv_len=1 << 20), "forward") == bytes_of(short, "forward")
