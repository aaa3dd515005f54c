"""What sinks are, and what judges find where one is wrong; test_biases.py has them against brute force."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attn_exp.attention.expected import expected
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Inputs, make_inputs
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
