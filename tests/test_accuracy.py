from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.attention.error import inaccuracy, tensor_error
from attn_exp.attention.expected import Expected, expected
from attn_exp.attention.inputs import make_inputs, rounded
from attn_exp.attention.mask_edges import edge_error
from attn_exp.attention.reference import reference
from attn_exp.attention.verdict import verdict
from attn_exp.core.case.case import Case
from attn_exp.core.record.checked import TensorError


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


@pytest.mark.parametrize(("value", "place"), [(float("nan"), 0), (float("inf"), -1)])
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


def test_a_float32_result_may_sum_in_another_order_and_not_be_wrong():
    # As two backends' decoding came out on an H200, 1.2e-6 off, where the plain formula's products sum by halves.
    case = Case(
        batch=3, q_heads=1, kv_heads=1, q_len=1, kv_len=1999, head_dim=256, value_dim=256, dtype="float32", causal=True
    )
    wanted = expected(case, make_inputs(case, "cpu", 5, with_gradients=False), with_gradients=False)
    for factor, right in ((1.2e-6, True), (1e-5, False)):
        found = wanted.judge("out", wanted.tensors["out"] * (1 + factor))
        assert (inaccuracy({"out": found}) is None) is right


@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_of_dq_that_cancels_is_judged_by_the_size_of_such_rows(sampled, monkeypatch):
    monkeypatch.setattr("attn_exp.attention.sampling._LEAST_SCORES", 1)
    case = Case(
        batch=1, q_heads=2, kv_heads=2, q_len=640, kv_len=640, head_dim=16, value_dim=16, dtype="bfloat16", causal=True
    )
    inputs = make_inputs(case, "cpu", 5, with_gradients=True)
    # The second query sees the first key a second time: its d_scores cancel, and nothing is left of its row.
    with torch.no_grad():
        for tensor in (inputs.k_bhsd, inputs.v_bhsd):
            tensor[:, :, 1] = tensor[:, :, 0]
    monkeypatch.setattr("attn_exp.attention.sampling.boundary_rows", lambda length: [0, 1, 2, 3, length - 1])
    wanted = expected(case, inputs, with_gradients=True, sampled=sampled)
    assert bool(wanted.places) is sampled
    right = expected(case, inputs, with_gradients=True, tolerances=wanted.tolerances).tensors["dq"]
    typical = float(right.norm(dim=-1).square().mean().sqrt())
    # Rows go with the inverse root of how many keys are seen: two by the second query.
    usual = typical * (sum(1 / keys for keys in range(2, 641)) / 640) ** -0.5 * 2**-0.5
    assert right[0, 0, 1].norm() < 1e-3 * typical < 0.2 * usual
    for share, is_wrong in ((0.1, False), (0.9, True)):
        dq = right.clone()
        dq[0, 0, 1, 0] += share * usual
        found = wanted.judge("dq", dq)
        assert (found.worst_row > found.row_tolerance) is is_wrong, found
    dq = right.clone()
    dq[0, 1, -1, 0] += 0.9 * right[0, 1, -1].norm()
    found = wanted.judge("dq", dq)
    assert found.worst_row > found.row_tolerance


LONG = Case(
    batch=1, q_heads=2, kv_heads=2, q_len=2048, kv_len=2048, head_dim=64, value_dim=64, dtype="bfloat16", causal=True
)  # fmt: skip
CODES = replace(LONG, dtype="float8_e4m3fn", q_len=1024, kv_len=1024)


def judged(case, wrong, **options):
    """What the verdict says on a right result that `wrong` changed before it was rounded."""
    inputs = make_inputs(case, "cpu", 7, with_gradients=False)
    right = reference(case, inputs, with_gradients=False)
    known = expected(case, inputs, with_gradients=False, **options)
    out = wrong(case, inputs.numbers(), right["out"].clone())
    out = rounded(out) if case.quantised else out.to(getattr(torch, case.dtype))
    return verdict(case, inputs, known, {"out": out}, {}).wrong


def unmasked(rows):
    """The last rows see every key."""

    def wrong(case, inputs, out):
        full = reference(replace(case, causal=False, dtype="float32"), inputs, with_gradients=False)["out"]
        out[:, :, -rows:] = full[:, :, -rows:]
        return out

    return wrong


def scores_scaled(factor):
    def wrong(case, inputs, out):
        scaled = replace(inputs, q_bhsd=inputs.q_bhsd.float() * factor)
        return reference(replace(case, dtype="float32"), scaled, with_gradients=False)["out"]

    return wrong


def padded(keys):
    """Keys and values of zero beyond the last are not masked."""

    def wrong(case, inputs, out):
        k, v = (torch.nn.functional.pad(tensor.float(), (0, 0, 0, keys)) for tensor in (inputs.k_bhsd, inputs.v_bhsd))
        longer = replace(case, kv_len=case.kv_len + keys, dtype="float32")
        return reference(longer, replace(inputs, k_bhsd=k, v_bhsd=v), with_gradients=False)["out"]

    return wrong


def zeroed(step):
    def wrong(case, inputs, out):
        out[:, :, ::step] = 0
        return out

    return wrong


def turned_around(case, inputs, out):
    out[:, 1, -16:] *= -1
    return out


FULL = replace(LONG, causal=False)
ODD = replace(FULL, q_len=1016, kv_len=1016)


@pytest.mark.parametrize(
    ("case", "wrong", "words"),
    [
        (LONG, unmasked(32), "after the last that a query sees were visible"),
        (LONG, scores_scaled(1.001), "out is as if scores were scaled by 1.00"),
        (FULL, scores_scaled(1.002), "out is as if scores were scaled by 1.00"),
        (ODD, padded(8), "out"),
        (CODES, zeroed(200), "out"),
        (CODES, turned_around, "out "),
        (CODES, unmasked(32), "after the last that a query sees were visible"),
    ],
)
def test_an_error_that_hides_in_a_norm_is_found_by_any_sampled_verdict(case, wrong, words):
    assert judged(case, lambda case, inputs, out: out) is None
    assert words in judged(case, wrong)
    assert words in judged(case, wrong, sampled=True)


def test_a_rounded_tanh_is_no_other_scale_of_the_scores():
    """In bf16 it lets small scores pass unchanged: eager mode on an H200 seemed to scale them by 1.0011."""
    case = replace(FULL, batch=1, q_heads=4, kv_heads=4, q_len=1024, kv_len=1024, head_dim=128, value_dim=128,
                   dtype="bfloat16", softcap=50.0)  # fmt: skip
    inputs = make_inputs(case, "cpu", 1, with_gradients=False)
    scores = inputs.q_bhsd @ inputs.k_bhsd.mT * case.head_dim**-0.5
    capped = torch.tanh(scores / case.softcap) * case.softcap
    out = torch.softmax(capped.float(), -1).to(scores.dtype) @ inputs.v_bhsd
    assert edge_error(case, inputs, out) is None
    # Of 1.004 one of 150 samples of rows knew too little.
    twice = torch.softmax(1.008 * capped.float(), -1).to(scores.dtype) @ inputs.v_bhsd
    assert "as if scores were scaled by 1.00" in (edge_error(case, inputs, twice) or "")


def keys_changed(keys, factor):
    """These keys have `factor` times their weight."""

    def wrong(case, inputs, out):
        q, k, v = (tensor.float() for tensor in inputs.qkv)
        weights = (q @ k.mT * case.head_dim**-0.5).exp()
        weights[..., keys] *= factor
        return weights @ v / weights.sum(-1, keepdim=True)

    return wrong


@pytest.mark.parametrize(("q_len", "kv_len", "keys"), [(1, 20_000, [13_332]), (700, 700, [127, 383, 500])])
@pytest.mark.parametrize(("factor", "what"), [(0, "were missing"), (2, "were counted twice")])
def test_a_key_that_is_lost_or_counted_twice_anywhere_is_named(q_len, kv_len, keys, factor, what):
    case = replace(FULL, q_len=q_len, kv_len=kv_len)
    named = f"keys {', '.join(map(str, keys))}" if len(keys) > 1 else f"key {keys[0]}"
    inputs = make_inputs(case, "cpu", 7, with_gradients=False)
    said = edge_error(case, inputs, keys_changed(keys, factor)(case, inputs, None).bfloat16())
    assert said.startswith(f"out is as if {named} {what}: the sampled rows deviate by ")
    assert edge_error(case, inputs, reference(case, inputs, with_gradients=False)["out"].bfloat16()) is None


@pytest.mark.parametrize(("name", "of"), [("q", "dq"), ("k", "dk"), ("v", "dv"), ("q", "out")])
def test_zeros_are_wrong_also_where_inputs_are_tiny(name, of):
    case = replace(LONG, dtype="float32", q_len=64, kv_len=64)
    tiny = [1e-7 * tensor for tensor in (normal(1, 2, 64, 64, seed=seed) for seed in range(4))]
    inputs = replace(make_inputs(case, "cpu", 7, with_gradients=True), v_bhsd=tiny[2].requires_grad_())
    known = expected(case, inputs, with_gradients=True)
    assert isinstance(known, Expected)
    assert inaccuracy({of: known.judge(of, torch.zeros_like(known.tensors[of]))}), of


def test_a_mask_that_is_off_in_the_backward_alone_is_inaccurate():
    case = replace(LONG, q_len=1024, kv_len=1024)
    inputs = make_inputs(case, "cpu", 7, with_gradients=True)
    right = reference(case, inputs, with_gradients=True)
    known = expected(case, inputs, with_gradients=True)
    in_16_bits = {name: tensor.bfloat16() for name, tensor in right.items()}
    assert verdict(case, inputs, known, in_16_bits, {}).wrong is None
    narrow = reference(replace(case, window=1023), inputs, with_gradients=True)
    wrong = in_16_bits | {name: narrow[name].bfloat16() for name in ("dq", "dk", "dv")}
    said = verdict(case, inputs, known, wrong, {}).wrong
    assert said.startswith("dq is as if in the backward the first key that a query sees were missing")


@pytest.mark.parametrize("dim", [6, 80, 96])
def test_a_scale_that_is_rounded_to_float32_is_right(dim):
    # As SDPA's formula computes: q and k are each multiplied by the root of the scale.
    case = Case(
        batch=1, q_heads=3, kv_heads=1, q_len=130, kv_len=130, head_dim=dim, value_dim=dim, dtype="float32"
    )  # fmt: skip
    for seed in range(8):
        inputs = make_inputs(case, "cpu", seed, with_gradients=False)
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs.qkv, enable_gqa=True)
        assert edge_error(case, inputs, out) is None
