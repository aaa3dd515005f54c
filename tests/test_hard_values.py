"""Hard inputs: they show bugs that normal inputs hide, and no honest formula fails on them.

results/cpu/hard_values/README.md has figures of the same in a loop.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.hard_values import KINDS, draw
from attn_exp.attention.inputs import make_inputs
from attn_exp.core.case.case import Case

DTYPES = ("bfloat16", "float16", "float32")
MASKS = (
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": 40},
    {"causal": True, "lengths": (0, 70, 0, 122, 0)},
    {"causal": True, "softcap": 50.0},
    {"causal": False, "softcap": 30.0},
)
SEEDS = range(1)


def case_of(dtype="bfloat16", **more):
    sizes = {"batch": 1, "q_heads": 4, "kv_heads": 2, "q_len": 192, "kv_len": 192, "head_dim": 64, "value_dim": 64}
    return Case(**(sizes | {"dtype": dtype} | more))


def mask_of(case):
    return hidden_keys(case, 0, case.q_len, torch.device("cpu")) if not case.dense else None


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


# A CPU takes seconds for float16, whose range is what it has of its own.
OF_FLOAT16 = ("mixed", "large", "denormal")


@pytest.mark.parametrize(
    ("dtype", "kind"), [(dtype, kind) for dtype in DTYPES for kind in (OF_FLOAT16 if dtype == "float16" else KINDS)]
)
def test_honest_formulas_stay_within_the_tolerances(dtype, kind):
    for seed, mask in enumerate(MASKS):
        case = case_of(dtype, **mask)
        inputs = hard(case, seed, kind, with_gradients=True)
        judge = expected(case, inputs, with_gradients=True).judge
        for function in honest(case):
            errors = {name: judge(name, tensor) for name, tensor in tensors_of(function, inputs).items()}
            assert inaccuracy(errors) is None, (mask, function)


def test_queries_of_zeros_alone_are_judged():
    case = case_of("float32", q_heads=2, q_len=1, causal=True)
    inputs = replace(hard(case, 1), q_bhsd=torch.zeros(1, 2, 1, 64, requires_grad=True), kind="zeros")
    for tensor in (inputs.k_bhsd, inputs.v_bhsd):
        tensor.requires_grad_()
    judge = expected(case, inputs, with_gradients=True).judge
    function = partial(formula, case, None)
    assert inaccuracy({name: judge(name, tensor) for name, tensor in tensors_of(function, inputs).items()}) is None
