"""Results in 16 bits that are less exact than kernels of their dtype, and honest ones that round in other places."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_exp.attention.expected import expected
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.rounding import loose_head
from attn_exp.core.case.case import Case

CASE = Case(
    batch=2, q_heads=4, kv_heads=2, q_len=128, kv_len=128, head_dim=64, value_dim=64, dtype="bfloat16", causal=False
)  # fmt: skip


def tensors_of(out, inputs):
    gradients = torch.autograd.grad(out, inputs.qkv, inputs.d_out_bhsd)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def setting(**changes):
    case = replace(CASE, **changes)
    inputs = make_inputs(case, "cpu", 5, with_gradients=True)
    return case, inputs, expected(case, inputs, with_gradients=True)


def codes(x):
    """int8 with a scale a row; its gradient is that of the identity."""
    step = x.detach().abs().amax(-1, keepdim=True) / 127
    return x + ((x / step).round() * step - x).detach()


def rounded_by(noise, tensor):
    """Add noise of this share of the norm."""
    wrong = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    return (tensor + wrong * (noise * tensor.norm() / wrong.norm())).bfloat16()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"softcap": 20.0}, {"q_len": 1, "kv_len": 300}], ids=str)
def test_who_rounds_scores_is_explained_and_who_does_not_is_exact(dtype, mask):
    case, inputs, wanted = setting(dtype=dtype, **mask)
    hidden = hidden_keys(case, 0, case.q_len, torch.device("cpu")) if not case.dense else None
    honest = [
        formula(case, hidden, *inputs.qkv),
        formula(case, hidden, *(one.float() for one in inputs.qkv)).to(inputs.q_bhsd.dtype),
    ]
    if case.softcap is None:
        honest.append(scaled_dot_product_attention(*inputs.qkv, is_causal=case.causal, enable_gqa=True))
    for out in honest:
        assert loose_head(case, inputs, wanted, tensors_of(out, inputs)) is None


def test_the_formula_in_bf16_is_beyond_what_is_usual_and_needs_the_explanation():
    case, inputs, wanted = setting(head_dim=128, value_dim=128, softcap=20.0)
    results = tensors_of(formula(case, None, *inputs.qkv), inputs)
    assert loose_head(case, inputs, wanted, results) is None
    other = make_inputs(case, "cpu", 6, with_gradients=False)
    assert "does not explain it" in loose_head(case, other, wanted, results)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"kv_heads": 4}], ids=str)
def test_codes_of_int8_and_a_log_sum_exp_in_bf16_are_loose(mask):
    case, inputs, wanted = setting(**mask)
    q, k, v = (one.float() for one in inputs.qkv)
    hidden = hidden_keys(case, 0, case.q_len, q.device) if not case.dense else None
    results = tensors_of(formula(case, hidden, codes(q), codes(k), v).bfloat16(), inputs)
    for name in ("out", "dq"):
        assert loose_head(case, inputs, wanted, {name: results[name]}).startswith(f"{name} in head")


def test_one_loose_head_is_named():
    case, inputs, wanted = setting(kv_heads=4)
    out = wanted.tensors["out"].clone()
    out[1, 2] = rounded_by(0.008, out[1, 2])
    said = loose_head(case, inputs, wanted, {"out": out.bfloat16()})
    assert said.startswith("out in head 2 of batch row 1 is off by 0.008")
    gradient = wanted.tensors["dv"].clone()
    gradient[0, 3] = rounded_by(0.009, gradient[0, 3])
    assert "dv in head 3 of batch row 0" in loose_head(case, inputs, wanted, {"dv": gradient.bfloat16()})


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_a_row_by_itself_is_no_loose_head(name):
    case, inputs, wanted = setting(kv_heads=4, causal=True)
    tensor = wanted.tensors[name].clone()
    # Rows have other judges: here one is off by as much as makes a head loose if all of its rows share it.
    row = tensor[1, 2, 3]
    loose = 3 * wanted.tolerances[name].usual * wanted.tensors[name][1, 2].norm() / row.norm()
    tensor[1, 2, 3] = rounded_by(float(loose), row)
    assert loose_head(case, inputs, wanted, {name: tensor.bfloat16()}) is None


def test_later_rows_under_a_causal_mask_are_not_hidden_by_the_first():
    case, inputs, wanted = setting(causal=True, kv_heads=4, q_len=512, kv_len=512, batch=1)
    right = wanted.tensors["out"]
    noise = torch.randn(384, 64, generator=torch.Generator().manual_seed(1)) * right[0, 1, 128:].norm(dim=-1)[:, None]
    out = right.clone()
    out[0, 1, 128:] += noise * (0.009 / 64**0.5)
    assert (out - right)[0, 1].norm() < wanted.tolerances["out"].usual * right[0, 1].norm()
    assert loose_head(case, inputs, wanted, {"out": out.bfloat16()}).startswith("out in head 1 of batch row 0")
