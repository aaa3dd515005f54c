"""Sinks against brute force in float64, and what judges find where one is wrong."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attn_exp.attention.expected import expected
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Inputs, make_inputs
from attn_exp.attention.reference import reference
from attn_exp.attention.scores import sinks_of
from attn_exp.attention.verdict import verdict
from attn_exp.backends.base import calls_of
from attn_exp.core.case.case import Case
from attn_exp.core.case.flops import compulsory_bytes, flops

NAMES = ("out", "dq", "dk", "dv", "d_sink")


def case(**sizes: Any) -> Case:
    base = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 40, "kv_len": 40, "head_dim": 16, "dtype": "float32"}
    given = base | {"sink": True} | sizes
    return Case(**({"value_dim": given["head_dim"]} | given))


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    kv_heads, causal, q_len = draw.choice((1, 2, 3)), draw.random() < 0.7, draw.randint(1, 30)
    mask = {draw.choice(("window", "prefix", "chunk")): draw.randint(1, 40)} if causal and draw.random() < 0.5 else {}
    sizes: dict[str, Any] = {"batch": draw.choice((1, 2, 3)), "q_len": q_len, "kv_len": q_len + draw.randint(0, 20)}
    if draw.random() < 0.2:
        lengths = tuple(draw.randint(1, 12) for _ in range(3))
        sizes = {"batch": 1, "q_len": sum(lengths), "kv_len": sum(lengths), "lengths": lengths}
    return case(
        q_heads=kv_heads * draw.choice((1, 2, 3)),
        kv_heads=kv_heads,
        value_dim=draw.choice((8, 16)),
        causal=causal,
        softcap=draw.choice((None, None, 5.0)),
        **sizes,
        **mask,
    )


def brute_force(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return output and gradients by autograd in float64, where the sink is a key like others that has no value."""
    q, k, v, d_out = (one.detach().double() for one in (*inputs.qkv, inputs.d_out_bhsd))
    assert inputs.sink is not None
    leaves = [one.requires_grad_() for one in (q, k, v, inputs.sink.detach().double())]
    group, shape = case.q_heads // case.kv_heads, (case.batch, case.q_heads, case.q_len, 1)
    scores = q @ k.repeat_interleave(group, 1).mT / case.head_dim**0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(hidden_keys(case, 0, case.q_len, q.device), -torch.inf)
    weights = torch.softmax(torch.cat([scores, leaves[3].expand(shape)], -1), -1)
    values = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2).repeat_interleave(group, 1)
    out = weights @ values
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, d_out)), strict=True))


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far a tensor is from what is right, relative to its norm."""
    return float((found.detach().double() - right).norm() / right.norm().clamp(min=1e-9))


def test_the_reference_equals_brute_force() -> None:
    for seed in range(30):
        one = random_case(seed)
        inputs = make_inputs(one, "cpu", seed, with_gradients=True)
        found = reference(one, inputs, with_gradients=True, precision=torch.float64)
        right = brute_force(one, inputs)
        assert all(off(found[name], right[name]) < 2e-6 for name in found), one


def test_sinks_differ_by_head_and_take_a_share_of_the_weight() -> None:
    one = case(q_heads=64, kv_heads=8, q_len=1000, kv_len=1000, dtype="bfloat16")
    sinks = sinks_of(one, torch.device("cpu"))
    assert sinks is not None and sinks.shape == (1, 64, 1, 1) and sinks.dtype == torch.bfloat16
    share = 1 / (1 + 1000 * torch.exp(0.5 - sinks.double()))
    assert 0.03 < share.min() < 0.1 and 0.4 < share.max() < 0.6
    assert sinks_of(replace(one, sink=False), torch.device("cpu")) is None


def eager(case: Case, inputs: Inputs, sink: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the formula's results in the case's dtype with these sinks, which may be wrong ones."""
    mask = None if case.dense else hidden_keys(case, 0, case.q_len, inputs.q_bhsd.device)
    calls = calls_of(partial(formula, case, mask, sinks=sink), inputs)
    out = calls.forward()
    gradients = torch.autograd.grad(out, inputs.leaves, inputs.d_out, allow_unused=True)
    made = zip(inputs.leaves, gradients, strict=True)
    return dict(zip(NAMES, (out.detach(), *(torch.zeros_like(a) if b is None else b for a, b in made)), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [{"q_len": 128, "kv_len": 128}, {"q_len": 700, "kv_len": 700, "causal": True}])
def test_a_verdict_finds_what_is_wrong_with_sinks(sizes: dict[str, Any], dtype: str) -> None:
    one = case(dtype=dtype, head_dim=32, **sizes)
    inputs = make_inputs(one, "cpu", 3, with_gradients=True)
    wanted = expected(one, inputs, with_gradients=True, sampled=True)
    assert inputs.sink is not None

    def wrong(results: dict[str, torch.Tensor]) -> str | None:
        return verdict(one, inputs, wanted, results, {}).wrong

    right = eager(one, inputs, inputs.sink)
    assert wrong(right) is None
    ignored = wrong(eager(one, inputs, None))
    assert ignored is not None and ignored.startswith("out ")
    assert wrong(eager(one, inputs, inputs.sink.roll(1, 1))) is not None
    for mistake in (torch.zeros_like, torch.neg, partial(torch.mul, other=1.5), lambda d_sink: d_sink.roll(1, 1)):
        found = wrong(right | {"d_sink": mistake(right["d_sink"])})
        assert found is not None and "d_sink" in found


def test_sinks_cost_bytes_and_no_products() -> None:
    one = case(dtype="bfloat16")
    without = replace(one, sink=False)
    for direction, numbers in (("forward", 1), ("backward", 2), ("step", 2)):
        assert flops(one, direction) == flops(without, direction)
        more = compulsory_bytes(one, direction, saves_lse=True) - compulsory_bytes(without, direction, saves_lse=True)
        assert more == numbers * 2 * one.q_heads
