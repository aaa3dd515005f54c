"""A single hard row among normal ones shows what a sample of rows does not, and no honest formula fails on it."""

import math
import re
from dataclasses import replace

import pytest
import torch
from test_hard_values import DTYPES, case_of, hidden, honest, keys_of_zeros_masked, no_maximum, scores_of, weighed

from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.rare_rows import rare_inputs
from attn_exp.attention.reference import capped
from attn_exp.attention.tolerance import measured_tolerances

MASKS = (
    {"causal": True, "batch": 2},
    {"causal": False, "batch": 3},
    {"causal": True, "window": 40},
    {"causal": True, "lengths": (70, 122)},
    {"causal": True, "q_len": 1},
    {"causal": True, "softcap": 50.0},
    {"causal": False, "head_dim": 16, "value_dim": 16},
)


def setting(dtype="bfloat16", **more):
    case = case_of(dtype, **({"causal": True} | more))
    inputs = make_inputs(case, "cpu", 3, with_gradients=True)
    return case, inputs, measured_tolerances(case, inputs, with_gradients=True)


def wrong(rare, out, bounds):
    """Return what is said of an output, rounded to the case's dtype."""
    return rare.wrong({"out": out.to(rare.inputs.q_bhsd.dtype)}, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_honest_formulas_are_right(dtype, mask):
    case, inputs, bounds = setting(dtype, **mask)
    for _ in range(2):
        for rare in rare_inputs(case, inputs):
            for function in honest(case):
                assert wrong(rare, function(*rare.inputs.qkv), bounds) is None, rare.hard


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_maximum_and_a_masked_key_of_zeros_are_named(dtype):
    case, inputs, bounds = setting(dtype, causal=False, batch=2)
    of_q, of_k, _ = rare_inputs(case, inputs)
    for rare in (of_q, of_k):
        said = wrong(rare, no_maximum(case, *rare.inputs.qkv), bounds)
        where = f"row {int(rare.queries[0])} of out in head {rare.head} of batch row {rare.batch}"
        assert said == f"with one large row of {rare.hard} among normal ones, {where} has values that are not finite"
    assert "is off by" in wrong(of_q, keys_of_zeros_masked(case, *of_q.inputs.qkv), bounds)


def test_a_scale_for_the_whole_tensor_is_not_exact_enough_beside_one_large_row():
    case, inputs, bounds = setting(causal=False)
    of_q, *_ = rare_inputs(case, inputs)
    q, k, v = of_q.inputs.qkv
    step = q.float().abs().amax() / 127
    coded = hidden(case, scores_of(case, (q.float() / step).round() * step, k)).softmax(-1)
    assert wrong(of_q, weighed(case, coded, v), bounds)


def usual(case, weigh):
    """Attention whose weights are made of its scores by a function."""
    return lambda q, k, v: weighed(case, weigh(hidden(case, scores_of(case, q, k))), v).to(q.dtype)


def divided(weights):
    return weights / weights.sum(-1, keepdim=True)


def trimmed(case, q, k, v):
    """Leave out keys that are zeros in all heads."""
    used = (k != 0).any(-1).any(0).any(0)
    return usual(case, lambda scores: scores.masked_fill(~used, -math.inf).softmax(-1))(q, k, v)


def silent(case, q, k, v):
    """Return zeros for queries that are zeros in all heads."""
    return usual(case, lambda scores: scores.softmax(-1))(q, k, v) * (q != 0).any(-1, keepdim=True).any(1, keepdim=True)


MISTAKES = {
    "clamped": (lambda case, *qkv: usual(case, lambda s: divided(s.clamp(max=80).exp()))(*qkv), "q"),
    "constant": (lambda case, *qkv: usual(case, lambda s: divided((s.clamp(max=165) - 80).exp()))(*qkv), "sink"),
    "of the first row of the batch": (
        lambda case, *qkv: usual(
            case, lambda s: divided((s - s[:1].amax(-1, keepdim=True)).clamp(max=80).exp() + 1e-37)
        )(*qkv),
        "q",
    ),
    "trimmed": (trimmed, "q"),
    "silent": (silent, "q"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_that_only_one_row_shows_are_found(name):
    case, inputs, bounds = setting(causal=False, batch=2)
    function, hard = MISTAKES[name]
    for _ in range(3):
        of_hard = {rare.hard: rare for rare in rare_inputs(case, inputs)}[hard]
        assert wrong(of_hard, function(case, *of_hard.inputs.qkv), bounds)


def test_a_softcap_that_is_left_out_or_approximated_shows_in_one_row():
    case, inputs, bounds = setting(causal=False, softcap=50.0)
    for of_q in (next(rare_inputs(case, inputs)) for _ in range(3)):
        scores = scores_of(case, *of_q.inputs.qkv[:2])
        ratio = scores / 50
        for taken in (scores, 50 * (ratio - ratio**3 / 3 + 2 * ratio**5 / 15)):
            assert wrong(of_q, weighed(case, taken.softmax(-1), of_q.inputs.v_bhsd), bounds)


def test_a_value_that_fp16_cannot_hold_is_that_of_the_hard_key():
    case, inputs, bounds = setting(causal=False)
    for of_q in (next(rare_inputs(case, inputs)) for _ in range(3)):
        q, k, v = of_q.inputs.qkv
        assert wrong(of_q, weighed(case, scores_of(case, q, k).softmax(-1), v.half()), bounds)


@pytest.mark.parametrize("heads", [1, 2])
def test_nothing_is_unusual_in_the_mean_of_few_heads(heads):
    case, inputs, _ = setting(q_heads=heads, kv_heads=heads, q_len=384, kv_len=384)
    for _ in range(3):
        for rare in rare_inputs(case, inputs):
            assert rare.inputs.v_bhsd.float().square().mean() < 1.8
            assert rare.inputs.d_out_bhsd.float().square().mean() < 1.2


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_dropped_beside_a_sink_show(dtype):
    case, inputs, bounds = setting(dtype)
    for *_, rare in (rare_inputs(case, inputs) for _ in range(3)):
        scores = hidden(case, scores_of(case, *rare.inputs.qkv[:2]))
        of_sink = scores.softmax(-1)[rare.batch, rare.head, rare.queries[1:], 0]
        assert of_sink.min() > 0.93 and (of_sink > 0.998).any()
        least = scores.amax(-1, keepdim=True) - math.log(16 * case.kv_len)
        dropped = weighed(case, scores.masked_fill(scores < least, -math.inf).softmax(-1), rare.inputs.v_bhsd)
        assert "with a first key that has nearly all" in wrong(rare, dropped, bounds)


def same(tensor):
    return tensor


def gradients(case, inputs, weights=same, d_out=same, d_out_of_dv=same, slope=same):
    """Return output and gradients in the case's dtype, computed in float32 with something else where it is said so."""
    group, (q, k, v) = case.q_heads // case.kv_heads, (one.float() for one in inputs.qkv)
    k, v = (one.repeat_interleave(group, 1) for one in (k, v))
    scores, bends = capped(case, q @ k.mT * case.head_dim**-0.5)
    exact = hidden(case, scores).softmax(-1)
    p, given, out = weights(exact), d_out(inputs.d_out_bhsd.float()), exact @ v
    ds = p * (given @ v.mT - (given * out).sum(-1, keepdim=True)) * case.head_dim**-0.5
    ds = ds if bends is None else ds * slope(bends)
    made = [ds @ k, ds.mT @ q, p.mT @ d_out_of_dv(given)]
    made[1:] = [one.unflatten(1, (-1, group)).sum(2) for one in made[1:]]
    return {
        name: one.to(inputs.q_bhsd.dtype) for name, one in zip(("out", "dq", "dk", "dv"), (out, *made), strict=True)
    }


def in_fp16(tensor):
    return tensor.half().float()


def scaled_into_fp16(tensor):
    return in_fp16(tensor / (largest := tensor.abs().amax((-1, -2), keepdim=True).clamp(min=1e-30))) * largest


BACKWARDS = {
    "exact": ({}, {}, None),
    "weights dropped": ({"weights": lambda p: p.masked_fill(p < 3e-6, 0.0)}, {}, "first key.* dq"),
    "d_out in fp16": ({"d_out": in_fp16}, {}, "first key.* dq"),
    "d_out in fp16 of dv": ({"d_out_of_dv": in_fp16}, {}, "first key.* dv"),
    "d_out scaled into fp16": ({"d_out": scaled_into_fp16}, {}, "first key.* dq"),
    "d_out in fp16 with a softcap": ({"d_out": in_fp16}, {"softcap": 50.0}, "large row of q .* dq"),
    "a slope left out": ({"slope": torch.ones_like}, {"softcap": 50.0}, "large row of q .* dq"),
    "exact with a softcap": ({}, {"softcap": 50.0}, None),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_that_is_wrong_for_few_rows_is_found(name):
    mistake, more, said = BACKWARDS[name]
    case, inputs, bounds = setting(**more)
    for _ in range(3):
        (rare,) = (one for one in rare_inputs(case, inputs) if one.slack_of_dq is not None)
        found = rare.wrong(gradients(case, rare.inputs, **mistake), bounds)
        assert found is None if said is None else re.search(said, found or "")


def test_who_looks_at_the_first_half_of_queries_and_keys_misses_a_hard_row():
    case, inputs, _ = setting(causal=True)
    for _ in range(20):
        late = []
        for rare in rare_inputs(case, inputs):
            if rare.hard != "sink":
                which = 0 if rare.hard == "q" else 1
                head = rare.head // (case.q_heads // case.kv_heads) if which else rare.head
                norms = rare.inputs.qkv[which][rare.batch, head].float().norm(dim=-1)
                late.append(int(norms.argmax()) >= 96)
        assert sorted(late) == [False, True]


def test_other_heads_and_rows_are_those_of_the_inputs_and_places_are_drawn_anew():
    case, inputs, _ = setting(causal=False)
    places = set()
    for _ in range(10):
        for rare in rare_inputs(case, inputs):
            if rare.hard == "sink":
                continue
            unlike = [int((one != like).any(-1).sum()) for one, like in zip(rare.inputs.qkv, inputs.qkv, strict=True)]
            if rare.hard == "q":
                # Beside the hard row those that are faint, and in all heads one of zeros; as many keys.
                assert 4 <= unlike[0] <= 2 + 33 + 4
                length = case.kv_len // 8
                assert unlike[1] <= 1 + case.kv_heads * (1 + length) and unlike[2] <= 3 + length
            else:
                assert unlike == [0, 1, 0]
            scores = scores_of(case, *rare.inputs.qkv[:2])
            assert 150 < scores[rare.batch, rare.head, int(rare.queries[0])].max() < 170
            places.add((rare.head, int(rare.queries[0])))
    assert len(places) > 10


def test_there_are_none_where_scores_do_not_reach_that_far():
    for more in ({"dtype": "float8_e4m3fn"}, {"head_dim": 8}):
        case = case_of(**more)
        assert not list(rare_inputs(case, make_inputs(case, "cpu", 1, with_gradients=False)))
    case, inputs, _ = setting()
    assert not list(rare_inputs(case, replace(inputs, kind="mixed")))


def test_rows_that_see_no_key_are_never_chosen():
    case = case_of(q_len=192, kv_len=10, causal=True, align="bottom_right")
    inputs = make_inputs(case, "cpu", 1, with_gradients=False)
    for rare in rare_inputs(case, inputs):
        assert int(rare.queries.min()) >= 182
        assert torch.isfinite(rare._reference(rare.batch, rare.head, rare.queries)["out"]).all()
