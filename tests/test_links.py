"""Calls that tell the next one's result but for signs: honest ones agree to the bit, and one wrong row shows."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fakes import CASE

from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.links import wrong_link
from attn_exp.attention.tolerance import measured_tolerances
from attn_exp.backends.base import calls_of
from attn_exp.worker.judge import linked
from attn_exp.worker.judge.judge import Judge

MIDSIZE = replace(CASE, batch=2, q_heads=4, kv_heads=2, q_len=96, kv_len=96, head_dim=32, value_dim=32)


@pytest.fixture(autouse=True)
def _every_call_is_linked(monkeypatch):
    monkeypatch.setattr(linked, "_ONE_OF", {"cpu": 1})


def made(case, direction, calls, wrong=lambda index, result: result):
    """Make so many calls of a pass as a timer does, and return what is wrong with them."""
    inputs = make_inputs(case, "cpu", 3, with_gradients=True)
    mask = hidden_keys(case, 0, case.q_len, inputs.q_bhsd.device)
    backend = calls_of(partial(formula, case, mask), inputs)
    judge = Judge(case, backend, inputs)
    run = backend.forward if direction == "forward" else backend.backward(backend.forward())
    count = 0

    def called():
        nonlocal count
        count += 1
        return wrong(count, run())

    timed = judge.timed(direction, called)
    judge.start(direction)
    for _ in range(calls):
        timed.before()
        timed.after(timed.run())
    links = judge.passes[direction].links
    tolerances = measured_tolerances(case, inputs, with_gradients=True)
    return links, wrong_link(links, tolerances)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_right_calls_agree_to_the_bit(direction, dtype):
    links, wrong = made(replace(MIDSIZE, dtype=dtype), direction, 24)
    assert wrong is None
    assert len(links) == 23
    assert {link.name for link in links} <= ({"out"} if direction == "forward" else {"dq", "dv"})
    assert max(float(link.off) for link in links) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_rows_of_one_head_of_one_call_are_named_by_that_call(dtype):
    def wrong(index, out):
        if index == 7:
            signs = torch.ones_like(out)
            signs[1, 3, 32:] = -1
            return out * signs
        return out

    _, found = made(replace(MIDSIZE, dtype=dtype), "forward", 10, wrong)
    assert found is not None
    assert found[0] == 7
    assert "a row of out is off by" in found[1]


def test_a_call_that_returns_the_result_before_it_is_unlike_it_but_for_signs():
    kept = []

    def stale(index, out):
        kept.append(out.clone())
        return kept[max(0, index - 2)]

    assert made(MIDSIZE, "forward", 10, stale)[1] is not None


def test_gradients_that_are_wrong_in_one_call_show():
    def wrong(index, gradients):
        dq, dk, dv = gradients
        if index > 4:
            dq, dv = dq.clone(), dv.clone()
            dq[0, 1, 64:], dv[1, 0, 64:] = 0.0, 0.0
        return dq, dk, dv

    assert made(MIDSIZE, "backward", 5, wrong)[1] is not None


def test_a_step_and_hard_values_have_no_links():
    case = MIDSIZE
    inputs = replace(make_inputs(case, "cpu", 3, with_gradients=True), kind="mixed")
    judge = Judge(case, calls_of(partial(formula, case, None), inputs), inputs)
    timed = judge.timed("forward", judge.forward)
    for _ in range(5):
        timed.before()
        timed.after(timed.run())
    assert judge.passes["forward"].links == []
