from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.attention import error as accuracy
from attn_exp.attention.error import inaccuracy, tensor_error
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.tolerance import expected
from attn_exp.core.case import Case
from attn_exp.core.record import TensorError


def normal(*shape, seed=11, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(relative=0.0, worst_row=0.0):
    return TensorError(relative=relative, worst_row=worst_row, max_abs=0.0, tolerance=0.01, row_tolerance=0.08)


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.floats(1e-4, 10))
def test_errors_equal_their_definition_in_float64(seed, dtype, size):
    reference = normal(2, 3, 5, 7, seed=seed)
    tensor = (reference + size * normal(2, 3, 5, 7, seed=seed + 1)).to(dtype)
    difference = tensor.double() - reference.double()
    rows = difference.norm(dim=-1)
    typical = (reference.double().norm(dim=-1) ** 2).mean().sqrt()
    found = tensor_error(tensor, reference)
    assert found.relative == pytest.approx((difference.norm() / reference.double().norm()).item(), rel=1e-4)
    assert found.worst_row == pytest.approx(
        (rows / reference.double().norm(dim=-1).clamp(min=typical)).max().item(), rel=1e-4
    )
    assert found.max_abs == pytest.approx(difference.abs().max().item(), rel=1e-4)
    assert (found.tolerance, found.row_tolerance) == (None, None)


def test_slices_do_not_change_the_answer(monkeypatch):
    reference, tensor = normal(3, 4, 9, 5), normal(3, 4, 9, 5, seed=12)
    whole = tensor_error(tensor, reference)
    monkeypatch.setattr(accuracy, "_CHUNK", 35)  # 7 rows at once, of 108
    sliced = tensor_error(tensor, reference)
    assert (sliced.worst_row, sliced.max_abs) == (whole.worst_row, whole.max_abs)
    assert sliced.relative == pytest.approx(whole.relative, rel=1e-6)


def test_a_tensor_equal_to_its_reference_is_off_by_nothing_in_any_layout():
    reference = normal(2, 3, 4, 5)
    other_layout = reference.transpose(1, 2).contiguous().transpose(1, 2)
    for tensor in (reference, other_layout, reference.clone().requires_grad_()):
        found = tensor_error(tensor, reference)
        assert (found.relative, found.worst_row, found.max_abs) == (0, 0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_one_value_that_is_not_finite_is_inaccurate(value, place):
    tensor = normal(2, 2, 4, 4)
    reference = tensor.clone()
    tensor.view(-1)[place] = value
    found = tensor_error(tensor, reference)
    assert (found.relative, found.worst_row, found.max_abs) == (None, None, None)
    assert inaccuracy({"out": error(), "dq": found}) == "dq has values that are not finite"


def test_one_wrong_row_among_many_is_found_by_the_worst_row_alone():
    reference = normal(1, 1, 100_000, 8)
    tensor = reference.clone()
    tensor[0, 0, 4321] = 0
    found = tensor_error(tensor, reference)
    assert found.relative < 0.01
    judged = replace(found, tolerance=0.01, row_tolerance=0.08)
    assert "a row of out is off by" in inaccuracy({"out": judged})


def test_a_row_of_zeros_in_the_reference_is_judged_by_the_typical_row():
    reference = normal(1, 1, 50, 8)
    reference[0, 0, 0] = 0
    tensor = reference.clone()
    tensor[0, 0, 0, 0] = 1e-6
    found = tensor_error(tensor, reference)
    assert 0 < found.worst_row < 1e-6


def test_another_shape_is_refused_even_with_as_many_elements():
    with pytest.raises(ValueError, match=r"the shape is \(2, 4, 3, 5\), not \(2, 3, 4, 5\)"):
        tensor_error(normal(2, 4, 3, 5), normal(2, 3, 4, 5))


def test_a_tensor_and_its_worst_row_have_a_bound_each():
    assert inaccuracy({"out": error(0.01, 0.08)}) is None
    assert inaccuracy({"out": error(0.0101, 0.0)}) == "out is off by 0.01 of its norm, allowed is 0.01"
    assert inaccuracy({"out": error(0.0, 0.081)}) == "a row of out is off by 0.081 of its norm, allowed is 0.08"
    assert inaccuracy({"out": error(0.0, None)}) == "out has values that are not finite"
    assert inaccuracy({}) is None


def test_a_float32_result_may_sum_in_another_order_and_not_be_wrong():
    # As two backends' decoding came out on an H200, 1.2e-6 off, where the plain formula's products sum by halves.
    case = Case(
        batch=3, q_heads=1, kv_heads=1, q_len=1, kv_len=1999, head_dim=256, value_dim=256, dtype="float32", causal=True
    )
    wanted = expected(case, make_inputs(case, "cpu", 5, with_gradients=False), with_gradients=False)
    for factor, right in ((1.2e-6, True), (1e-5, False)):
        found = wanted.judge("out", wanted.tensors["out"] * (1 + factor))
        assert (inaccuracy({"out": found}) is None) is right


def test_zeros_where_the_reference_is_zero_are_right():
    # dq and dk of a case whose queries see one key each are exactly zero: a softmax over one key is constant.
    assert inaccuracy({"dq": tensor_error(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))}) is None
