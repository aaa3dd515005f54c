"""attn_exp.time: a function and tensors of one's own, judged and timed in this process as backends are."""

import random
import re
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attn_exp
from attn_exp.core.errors import UserError
from attn_exp.core.record.file import read_record

QUICK = {"stopping": {"min_rounds": 2, "max_rounds": 2, "budget_s": 0.01}}
sdpa = scaled_dot_product_attention
causal = partial(sdpa, is_causal=True)
BIAS = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))


def tensors(dtype=torch.float32, kv_heads=2, length=64, kv_len=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 2, length, 32), (2, kv_heads, kv_len, 32), (2, kv_heads, kv_len, 32))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def timed(function, *given, **options):
    return attn_exp.time(function, *(given or tensors()), **{**QUICK, "name": "mine", **options})


def biased(q, k, v):
    return sdpa(q, k, v, attn_mask=BIAS.to(q.dtype))


def half_of_the_time_alone(q, k, v):
    """Right in the first call, later a result that was kept."""
    if not kept:
        kept.append(sdpa(q, k, v))
    return kept[0]


kept = []


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (sdpa, {}),
        (causal, {"causal": True}),
        (partial(sdpa, scale=0.05), {"scale": 0.05}),
        (biased, {"reference": biased}),
        (sdpa, {"passes": ["forward", "backward", "step"]}),
        (sdpa, {"determinism": True}),
    ],
    ids=["plain", "causal", "scale", "reference", "passes", "determinism"],
)
def test_a_right_function_has_times_and_its_tensors_stay_as_they_were(function, options):
    given = tensors()
    before = [one.clone() for one in given]
    found = timed(function, *given, **options)
    assert (found.status, found.reason) == ("ok", None)
    for direction in options.get("passes", ["forward"]):
        assert found.time_us(direction) > 0 and f"{direction}/error_" in " ".join(found.metrics)
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))
    assert not any(one.requires_grad for one in given)
    assert found.metrics.get("forward/deterministic") == (1.0 if "determinism" in options else None)
    # Of a reference of one's own nobody knows the work.
    assert ("forward/tflops" in found.metrics) == ("reference" not in options)
    calls = [one.call for one in found.record.judged]
    assert {"first", "timed"} <= set(calls)
    # On normal and on hard values, where what is right is known for all values.
    assert calls.count("hard") == (2 if not {"scale", "reference"} & options.keys() else 0)


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (sdpa, {"causal": True}, "out is off by"),
        (partial(sdpa, scale=0.06), {"scale": 0.05}, "out is off by"),
        (sdpa, {"reference": biased}, "out is off by"),
        (half_of_the_time_alone, {}, "out is off by"),
        (lambda q, k, v: sdpa(q, k, v).double(), {}, "the dtype of out is float64, not float32"),
        (lambda q, k, v: (sdpa(q, k, v), None), {}, "out is no torch.Tensor but of type builtins.tuple"),
        (lambda q, k, v: sdpa(q, k, v)[:, :1], {}, "the shape of out is"),
        (
            lambda q, k, v: sdpa(q.mul_(1.0001), k, v),
            {},
            "q of the inputs that the calls read does not have the numbers given",
        ),
    ],
    ids=["mask", "scale", "reference", "kept", "dtype", "tuple", "shape", "writes"],
)
def test_a_wrong_function_is_inaccurate_and_has_no_time(function, options, reason):
    kept.clear()
    found = timed(function, **options)
    assert found.status == "inaccurate"
    assert re.search(reason, found.reason), found.reason
    with pytest.raises(UserError, match="mine has no time, it is inaccurate"):
        found.time_us()


def test_a_function_that_raises_is_a_status():
    found = timed(lambda q, k, v: [][0])
    assert found.status == "error" and "IndexError" in found.reason and "IndexError" in repr(found)


def test_gradients_are_asked_for_if_a_tensor_requires_them():
    q, k, v = tensors()
    found = timed(sdpa, q.requires_grad_(), k, v)
    assert sorted(found.record.passes) == ["backward", "forward"] and q.grad is None
    assert {"dq", "dk", "dv"} <= found.record.passes["backward"].errors.keys()
    forward_only = timed(sdpa, q, k, v, passes=("forward",))
    with pytest.raises(UserError, match=r"backward was not measured: add it with passes=\['backward'\]"):
        forward_only.time_us("backward")


def test_strides_are_those_of_the_tensors_and_shared_memory_is_copied():
    seen = []

    def look(q, k, v):
        seen.append((q.stride(), k.stride(), v.stride()))
        return sdpa(q, k, v)

    packed = torch.randn(2, 64, 3, 2, 32, generator=torch.Generator().manual_seed(1))
    q, k, v = (one.transpose(1, 2) for one in packed.unbind(2))
    found = timed(look, q, k, v)
    assert found.status == "ok" and set(seen) == {(q.stride(), k.stride(), v.stride())}
    assert found.result.case.layout == "bhsd"
    rows = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(2)).expand(2, 2, 64, 32)
    assert timed(sdpa, rows, rows, rows).status == "ok"


def test_grouped_heads_and_both_alignments():
    given = tensors(kv_heads=1)
    assert timed(partial(sdpa, enable_gqa=True), *given).status == "ok"
    longer = tensors(kv_len=96)
    assert timed(causal, *longer, causal=True).status == "ok"
    bottom = torch.ones(64, 96, dtype=torch.bool).tril(32)
    shown = partial(sdpa, attn_mask=bottom)
    assert timed(shown, *longer, causal=True, align="bottom_right").status == "ok"
    assert timed(shown, *longer, causal=True).status == "inaccurate"


def test_settings_of_the_program_are_left_as_they_were():
    random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), torch.get_rng_state()
    torch.set_grad_enabled(False)
    try:
        assert timed(sdpa, passes=["forward"]).status == "ok"
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def test_functions_timed_into_one_sweep_are_compared(tmp_path):
    for name, function in (("fused", sdpa), ("biased", lambda q, k, v: sdpa(q, k, v, attn_mask=torch.zeros(64, 64)))):
        found = timed(function, sweep="mine", folder=tmp_path, name=name)
        assert read_record(found.result.path.parent).metrics == found.record.metrics
    sweep = attn_exp.load("mine", folder=tmp_path)
    assert sorted(row.cell.result.label for row in attn_exp.compare(sweep).rows) == ["biased", "fused"]
    assert sweep.results[0].model == "given" and sweep.results[0].measuring.inputs == "given"


def test_it_is_one_line_and_a_table_in_a_notebook():
    found = timed(sdpa)
    assert repr(found).startswith("<ok mine b2 h2 s64 d32 fp32 full inputs given fwd ")
    assert "<table>" in found._repr_html_() and "us</th>" in found._repr_html_()


def nan(q, k, v):
    return q.clone().fill_(float("nan")), k, v


Q, K, V = tensors()


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((Q[0], K, V), {}, r"q has the shape \(2, 64, 32\): give \(batch, heads, length, dim\)"),
        ((Q, K.half(), V), {}, "k is torch.float16 on cpu, q is torch.float32 on cpu: give the same"),
        ((Q.double(), K.double(), V.double()), {}, "the tensors are float64: give one of bfloat16, float16, float32"),
        ((Q, K[:, :, :, :16], V), {}, "the shapes do not fit each other"),
        (nan(Q, K, V), {}, "q has values that are not finite"),
        ((Q, K, V), {"attn_mask": Q}, "attn_mask is none of .*: if the function computes with it, give ref"),
        ((Q, K, V), {"timer": "events"}, "timer=events does not exist: did you mean 'event'"),
        ((Q, K, V), {"reference": sdpa, "causal": True}, "reference= says what is right: leave causal="),
        ((Q, K, V), {"reference": lambda q, k, v: 1 / 0}, "the reference cannot be used: ZeroDivisionError"),
        ((Q, K, V), {"reference": lambda q, k, v: q / 0 * 0}, "the reference cannot be used: .*not finite"),
    ],
)
def test_a_mistake_is_raised_in_one_sentence(given, options, message):
    with pytest.raises(UserError, match=message):
        timed(sdpa, *given, **options)
