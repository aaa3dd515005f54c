"""Rows of a batch that are alike but for signs are judged by one reference, and compared with each other."""

import random
from dataclasses import replace

import pytest
import torch
from cheats.corpus import case_of

from attn_exp.attention.alike import Alike, alike_inputs
from attn_exp.attention.expected import expected
from attn_exp.attention.fp8_formula import fp8_formula
from attn_exp.attention.fresh_inputs import flip_rows
from attn_exp.attention.fused_formula import fused_formula
from attn_exp.attention.inputs import make_inputs

BATCH, ROW = 3, 1


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16", "float8_e4m3fn"])
def judged(request):
    """Rows that are alike, the reference of one of them, and right results of all."""
    case = case_of(64, batch=BATCH, kv_heads=2, dtype=request.param, causal=True, layout="bshd")
    alike = alike_inputs("mixed", case, make_inputs(case, "cpu", 1, with_gradients=False), 5)
    row = alike.inputs.row(ROW)
    for tensor in row.qkv:
        tensor.requires_grad_()
    right = fp8_formula if case.quantised else fused_formula
    of_row = expected(replace(case, batch=1), row, with_gradients=True)
    return alike, of_row, right(case, alike.inputs, with_gradients=True)


def test_right_results_of_all_rows_are_alike(judged):
    alike, of_row, results = judged
    assert alike.wrong_row(ROW, of_row, results, {}) is None


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("row", [0, 2])
def test_a_tensor_that_is_wrong_in_another_row_of_the_batch_is_found(judged, name, row):
    alike, of_row, results = judged
    for wrong, said in (
        (lambda tensor: 0 * tensor, "from row 1, which has the same inputs but for signs"),
        (lambda tensor: -tensor, f"{name} in row {row} of the batch is off by 2 of its norm"),
        (lambda tensor: tensor * float("nan"), f"{name} of row {row} of the batch has values that are not finite"),
    ):
        spoiled = results[name].clone()
        spoiled[row] = wrong(spoiled[row])
        assert said in alike.wrong_row(ROW, of_row, results | {name: spoiled}, {})


def test_a_row_that_is_taken_for_another_is_found(judged):
    alike, of_row, results = judged
    for name, tensor in results.items():
        assert alike.wrong_row(ROW, of_row, results | {name: tensor[[0, 1, 1]]}, {}), name


def test_only_signs_of_the_same_channels_differ_so_that_scores_are_equal(judged):
    alike, _, _ = judged
    of_scores, of_values = alike.signs
    assert len(set(of_scores)) == len(set(of_values)) == BATCH
    made = alike.inputs
    for tensor, bits in zip(
        (*made.qkv, made.d_out), (of_scores, of_scores, of_values, of_values), strict=True
    ):  # fmt: skip
        same = tensor.clone()
        flip_rows(same, bits)
        assert all(torch.equal(same[0].float(), other.float()) for other in same)


def test_rows_have_layout_dtype_and_scales_of_the_case_also_on_normal_values():
    for dtype in ("bfloat16", "float8_e4m3fn"):
        case = case_of(64, batch=BATCH, dtype=dtype, layout="bshd")
        like = make_inputs(case, "cpu", 1, with_gradients=False)
        made = alike_inputs("normal", case, like, 5)
        assert isinstance(made, Alike) and made.inputs.scales == like.scales
        for one, other in zip((*made.inputs.qkv, made.inputs.d_out), (*like.qkv, like.d_out), strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
            deviation = one.float().std() / other.float().std()
            assert deviation == pytest.approx(1.0, abs=0.2)
    assert random.Random(5).getrandbits(case.head_dim) == made.signs[0][0]
