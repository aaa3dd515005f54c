"""Hard inputs: they show bugs that normal inputs hide, and no honest formula fails on them.

bench/hard_alarms.py runs the same in a loop: results/cpu/hard_values/README.md has its figures.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_exp.attention.alike import alike_inputs
from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.formula import formula, hidden_keys, masked
from attn_exp.attention.fused_formula import fused_formula
from attn_exp.attention.hard_values import KINDS, draw
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.verdict import verdict
from attn_exp.core.case import Case

DTYPES = ("bfloat16", "float16", "float32")
MASKS = (
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": 40},
    {"causal": True, "lengths": (70, 122)},
    {"causal": True, "softcap": 50.0},
    {"causal": False, "softcap": 30.0},
)
SEEDS = range(2)


def case_of(dtype="bfloat16", **more):
    sizes = {"batch": 1, "q_heads": 4, "kv_heads": 2, "q_len": 192, "kv_len": 192, "head_dim": 64, "value_dim": 64}
    return Case(**(sizes | {"dtype": dtype} | more))


def mask_of(case):
    return hidden_keys(case, 0, case.q_len, torch.device("cpu")) if masked(case) else None


def hard(case, seed, kind="mixed", *, with_gradients=False):
    like = make_inputs(case, "cpu", seed, with_gradients=False)
    made = draw(kind, case, torch.Generator().manual_seed(seed), like=like)
    for tensor in made.qkv:
        tensor.requires_grad_(with_gradients)
    return made


def scores_of(case, q, k):
    k = k.repeat_interleave(case.q_heads // case.kv_heads, dim=1)
    return q.float() @ k.float().mT * case.head_dim**-0.5


def weighed(case, weights, v):
    return weights @ v.float().repeat_interleave(case.q_heads // case.kv_heads, dim=1)


def bent(case, scores):
    return scores if case.softcap is None else case.softcap * torch.tanh(scores / case.softcap)


def hidden(case, scores):
    mask = mask_of(case)
    return scores if mask is None else scores.masked_fill(mask, -torch.inf)


def no_softcap(case, q, k, v):
    return weighed(case, hidden(case, scores_of(case, q, k)).softmax(-1), v)


def clamped(case, q, k, v, at=20.0):
    return weighed(case, hidden(case, bent(case, scores_of(case, q, k)).clamp(-at, at)).softmax(-1), v)


def no_maximum(case, q, k, v):
    weights = hidden(case, scores_of(case, q, k)).exp()
    return weighed(case, weights, v) / weights.sum(-1, keepdim=True)


def maximum_from_zero(case, q, k, v):
    """As flash-attention#2082 and pytorch#193893: a zero among the scores is the maximum of negative rows."""
    scores = hidden(case, scores_of(case, q, k))
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=0)).exp()
    return weighed(case, weights, v) / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def never_rescaled(case, q, k, v, *, sums_are=False):
    """An online softmax over tiles of 64 keys that keeps the numerator as it was when the maximum grows."""
    scores = hidden(case, bent(case, scores_of(case, q, k)))
    values = v.float().repeat_interleave(case.q_heads // case.kv_heads, dim=1)
    largest = torch.full((*scores.shape[:-1], 1), -1e30)
    out, total = torch.zeros(()), torch.zeros(())
    for begin in range(0, case.kv_len, 64):
        tile = scores[..., begin : begin + 64]
        new = torch.maximum(largest, tile.amax(-1, keepdim=True))
        weights = (tile - new).exp()
        out = out + weights @ values[..., begin : begin + 64, :]
        total = total * ((largest - new).exp() if sums_are else 1.0) + weights.sum(-1, keepdim=True)
        largest = new
    return out / total


def unmasked_padding(case, q, k, v):
    """Eight keys of zeros behind the last one, and all rows see them."""
    scores = hidden(case, bent(case, scores_of(case, q, k)))
    weights = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 8)], dim=-1).softmax(-1)
    return weighed(case, weights[..., : case.kv_len], v)


def maximum_of_the_first_tile(case, q, k, v):
    scores = hidden(case, bent(case, scores_of(case, q, k)))
    weights = (scores - scores[..., :64].amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    return weighed(case, weights, v) / weights.sum(-1, keepdim=True)


def keys_of_zeros_masked(case, q, k, v):
    """As padding, with a mask that is taken from the values."""
    zeros = (k == 0).all(-1)[:, :, None].repeat_interleave(case.q_heads // case.kv_heads, dim=1)
    scores = hidden(case, bent(case, scores_of(case, q, k))).masked_fill(zeros, -torch.inf)
    return weighed(case, scores.softmax(-1), v)


BUGS = {
    "no softcap": (no_softcap, lambda case: case.softcap),
    "clamped at 20": (clamped, lambda case: True),
    "clamped at 80": (partial(clamped, at=80.0), lambda case: not case.softcap),
    "no maximum": (no_maximum, lambda case: not case.softcap),
    "maximum from zero": (maximum_from_zero, lambda case: not case.softcap),
    "nothing rescaled": (never_rescaled, lambda case: True),
    "numerator not rescaled": (partial(never_rescaled, sums_are=True), lambda case: True),
    "padding not masked": (unmasked_padding, lambda case: True),
    "maximum of the first tile": (maximum_of_the_first_tile, lambda case: not case.softcap),
    "keys of zeros masked": (keys_of_zeros_masked, lambda case: True),
}


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_on_mixed_values_shows_each_bug(dtype, mask):
    case = case_of(dtype, **mask)
    for seed in SEEDS:
        inputs = hard(case, seed)
        judge = expected(case, inputs, with_gradients=False).judge
        for name, (bug, applies) in BUGS.items():
            if applies(case):
                out = bug(case, *inputs.qkv).to(inputs.q_bhsd.dtype)
                assert inaccuracy({"out": judge("out", out)}), (name, seed)


def test_normal_values_hide_these_bugs():
    case = case_of(softcap=50.0, causal=True)
    inputs = make_inputs(case, "cpu", 1, with_gradients=False)
    judge = expected(case, inputs, with_gradients=False).judge
    for bug in (no_softcap, clamped):
        assert not inaccuracy({"out": judge("out", bug(case, *inputs.qkv).bfloat16())})


def sdpa(case, backend, q, k, v):
    mask = mask_of(case)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=None if mask is None else ~mask, enable_gqa=case.q_heads != case.kv_heads
        )


def honest(case):
    """Correct functions of q, k and v: the formula in the case's dtype and in float32, and PyTorch's on a CPU."""
    mask = mask_of(case)
    yield partial(formula, case, mask)
    yield lambda q, k, v: formula(case, mask, q.float(), k.float(), v.float()).to(q.dtype)
    if case.softcap is None:
        yield partial(sdpa, case, SDPBackend.FLASH_ATTENTION)
        yield partial(sdpa, case, SDPBackend.MATH)


def tensors_of(function, inputs):
    out = function(*inputs.qkv)
    gradients = torch.autograd.grad(out, inputs.qkv, inputs.d_out_bhsd)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_formulas_stay_within_the_tolerances(dtype, kind):
    for seed, mask in enumerate(MASKS):
        case = case_of(dtype, **mask)
        inputs = hard(case, seed, kind, with_gradients=True)
        judge = expected(case, inputs, with_gradients=True).judge
        for function in honest(case):
            errors = {name: judge(name, tensor) for name, tensor in tensors_of(function, inputs).items()}
            assert inaccuracy(errors) is None, (mask, function)


def test_tolerances_on_mixed_values_stay_narrow():
    for dtype, most in (("bfloat16", 0.06), ("float16", 0.006), ("float32", 1e-3)):
        case = case_of(dtype, causal=True)
        allowed = expected(case, hard(case, 3), with_gradients=False).tolerances["out"]
        assert allowed.relative < most


def test_scores_are_what_the_kinds_promise():
    case = case_of("float32", causal=False)

    def scores(kind):
        inputs = hard(case, 5, kind)
        return scores_of(case, *inputs.qkv[:2])

    assert 4 < scores("sharp").std() < 6
    rows = scores("negative").amax(-1)
    assert rows.max() < -20
    assert rows.min() < -350
    assert scores("positive").amax() > 400
    assert scores("abyss").amax() < -2e4
    assert scores("constant").std(-1).max() < 1e-5
    assert 0.5 < scores("sinks").softmax(-1)[..., 0].mean() < 0.99
    capped = case_of("float32", causal=False, softcap=50.0)
    assert (scores_of(capped, *hard(capped, 5, "sharp").qkv[:2]).abs() > 50).float().mean() > 0.02


def test_keys_of_zeros_are_in_some_heads_and_never_both_of_a_pair():
    for kv_heads in (1, 2, 5):
        case = case_of("float32", q_heads=kv_heads, kv_heads=kv_heads)
        found = set()
        for seed in range(12):
            zeros = (hard(case, seed).k_bhsd == 0).all(-1)[0]
            assert not (zeros[:, ::2] & zeros[:, 1::2]).any()
            found.add(tuple(zeros.any(-1).tolist()))
        # In heads of even indices deeply negative scores have no key of 0 beside them.
        every_other = tuple(head % 2 == 1 for head in range(kv_heads))
        assert found == ({(False,), (True,)} if kv_heads == 1 else {every_other})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_channel_that_is_lost_beside_large_ones_is_named(dtype):
    case = case_of(dtype, causal=True)
    inputs = hard(case, 3, with_gradients=True)
    wanted = expected(case, inputs, with_gradients=True)
    results = tensors_of(partial(formula, case, mask_of(case)), inputs)
    assert verdict(case, inputs, wanted, results, {}).wrong is None
    for name in ("out", "dv"):
        lost = results[name].clone()
        # Two of three channels are larger, or smaller.
        lost[..., 5] = 0.0
        assert inaccuracy({name: wanted.judge(name, lost)}) is None
        assert verdict(case, inputs, wanted, {name: lost}, {}).wrong.startswith(f"channel 5 of {name} is off")


def test_magnitudes_reach_the_limits_of_the_dtype():
    for dtype in DTYPES:
        case, limits = case_of(dtype, value_dim=96), torch.finfo(getattr(torch, dtype))
        v = hard(case, 1, "denormal").v_bhsd.abs()
        assert ((v > 0) & (v < limits.tiny)).any()
        assert hard(case, 1, "large").v_bhsd.abs().max() > (1e3 if dtype == "float16" else 1e8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_hard_inputs_can_be_copied_into_the_normal_ones(kind, layout):
    for dtype in (*DTYPES, "float8_e4m3fn"):
        case = case_of(dtype, layout=layout)
        like = make_inputs(case, "cpu", 1, with_gradients=False)
        made = draw(kind, case, torch.Generator().manual_seed(2), like=like)
        again = draw(kind, case, torch.Generator().manual_seed(2), like=like)
        assert made.scales == like.scales
        for tensor, normal, same in zip(
            (*made.qkv, made.d_out), (*like.qkv, like.d_out), (*again.qkv, again.d_out), strict=True
        ):
            assert (tensor.shape, tensor.dtype, tensor.stride()) == (normal.shape, normal.dtype, normal.stride())
            assert tensor.float().isfinite().all()
            assert torch.equal(tensor.float(), same.float())


@pytest.mark.parametrize("head_dim", [1, 2, 3, 8, 24, 256])
def test_any_head_dim_and_length_has_hard_inputs(head_dim):
    for q_len, kv_len in ((1, 1), (1, 77), (5, 9), (9, 5)):
        case = case_of(q_len=q_len, kv_len=kv_len, head_dim=head_dim, causal=True, align="top_left")
        like = make_inputs(case, "cpu", 1, with_gradients=False)
        made = alike_inputs("mixed", case, like, 7).inputs
        assert all(tensor.float().isfinite().all() for tensor in (*made.qkv, made.d_out))
        assert fused_formula(case, made, with_gradients=False)["out"].isfinite().all()


def test_fp8_has_tolerances_on_mixed_values_that_show_a_missing_maximum():
    case = case_of("float8_e4m3fn", head_dim=128)
    like = make_inputs(case, "cpu", 1, with_gradients=False)
    inputs = alike_inputs("mixed", case, like, 3).inputs
    found = expected(case, inputs, with_gradients=True)
    numbers = inputs.numbers()
    assert inaccuracy({"out": found.judge("out", no_maximum(case, *numbers.qkv))})
    assert not inaccuracy({"out": found.judge("out", formula(case, None, *numbers.qkv))})


def test_queries_of_zeros_alone_are_judged():
    case = case_of("float32", q_heads=2, q_len=1, causal=True)
    inputs = replace(hard(case, 1), q_bhsd=torch.zeros(1, 2, 1, 64, requires_grad=True), kind="zeros")
    for tensor in (inputs.k_bhsd, inputs.v_bhsd):
        tensor.requires_grad_()
    judge = expected(case, inputs, with_gradients=True).judge
    function = partial(formula, case, None)
    assert inaccuracy({name: judge(name, tensor) for name, tensor in tensors_of(function, inputs).items()}) is None
