"""ALiBi, biases and sinks against brute force in float64; what judges find where the former are wrong; who has them."""

import itertools
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
from attn_exp.attention.scores import alibi_slopes, bias_tensor
from attn_exp.attention.verdict import verdict
from attn_exp.backends.base import calls_of
from attn_exp.backends.flex import flex_function
from attn_exp.core.case.case import Case
from attn_exp.core.case.flops import compulsory_bytes, flops, unmasked_pairs

NAMES = ("out", "dq", "dk", "dv")
CPU = torch.device("cpu")


def case(**sizes: Any) -> Case:
    base = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 40, "kv_len": 40, "head_dim": 16, "dtype": "float32"}
    given = base | sizes
    return Case(**({"value_dim": given["head_dim"]} | given))


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    kv_heads, causal, q_len = draw.choice((1, 2, 3)), draw.random() < 0.7, draw.randint(1, 30)
    mask = {draw.choice(("window", "prefix", "chunk")): draw.randint(1, 40)} if causal and draw.random() < 0.5 else {}
    sizes: dict[str, Any] = {"batch": draw.choice((1, 2, 3)), "q_len": q_len, "kv_len": q_len + draw.randint(0, 20)}
    alibi, bias = draw.choice(
        ((True, None), (False, "heads"), (False, "shared"), (True, "heads"), (True, "shared"), (False, None))
    )
    if bias is None and draw.random() < 0.6:
        lengths = tuple(draw.randint(1, 9) for _ in range(3))
        kv_lengths = draw.choice((None, tuple(length + draw.randint(0, 9) for length in lengths)))
        sizes = {"batch": 1, "q_len": sum(lengths), "kv_len": sum(kv_lengths or lengths)}
        sizes |= {"lengths": lengths, "kv_lengths": kv_lengths}
    align = draw.choice(("top_left", "bottom_right")) if "lengths" not in sizes and not mask else "bottom_right"
    return case(
        q_heads=kv_heads * draw.choice((1, 2, 3)), kv_heads=kv_heads, value_dim=draw.choice((8, 16)), causal=causal,
        softcap=draw.choice((None, None, 5.0)), sink=draw.random() < 0.5, alibi=alibi, bias=bias, align=align,
        **sizes, **mask,
    )  # fmt: skip


def added_by_hand(case: Case) -> torch.Tensor:
    """Return ALiBi's terms, number by number, and the bias as the tensor that backends get."""
    added = torch.zeros(1, case.q_heads, case.q_len, case.kv_len, dtype=torch.float64)
    if case.bias is not None:
        added += bias_tensor(replace(case, alibi=False), CPU, torch.float32)
    if not case.alibi:
        return added
    slopes = torch.tensor(alibi_slopes(case.q_heads)).double()
    sequences = zip(case.lengths or (case.q_len,), case.kv_lengths or case.lengths or (case.kv_len,), strict=True)
    row = start = 0
    for queries, keys in sequences:
        for query in range(queries):
            own = start + query + (keys - queries if case.align == "bottom_right" else 0)
            for key in range(case.kv_len):
                added[0, :, row + query, key] -= slopes * abs(own - key)
        row, start = row + queries, start + keys
    return added


def brute_force(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return output and gradients by autograd in float64."""
    leaves = [one.detach().double().requires_grad_() for one in inputs.qkv]
    group, q = case.q_heads // case.kv_heads, leaves[0]
    k, v = (one.repeat_interleave(group, 1) for one in leaves[1:])
    scores = q @ k.mT / case.head_dim**0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = (scores + added_by_hand(case)).masked_fill(hidden_keys(case, 0, case.q_len, CPU), -torch.inf)
    if inputs.sink is not None:
        scores = torch.cat([scores, inputs.sink.detach().double().expand(*scores.shape[:-1], 1)], -1)
    out = torch.softmax(scores, -1)[..., : case.kv_len] @ v
    gradients = torch.autograd.grad(out, leaves, inputs.d_out_bhsd.double())
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far a tensor is from what is right, relative to its norm."""
    return float((found.detach().double() - right).norm() / right.norm().clamp(min=1e-9))


def test_the_reference_equals_brute_force() -> None:
    for seed in range(50):
        one = random_case(seed)
        inputs = make_inputs(one, "cpu", seed, with_gradients=True)
        found = reference(one, inputs, with_gradients=True, precision=torch.float64)
        for name, right in brute_force(one, inputs).items():
            # A query that sees one key has no gradient.
            assert off(found[name], right) < 2e-6 or right.norm() < 1e-6, (one, name)


def test_slopes_are_those_of_the_papers_code() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(16)[:2] == [2**-0.5, 0.5] and alibi_slopes(1) == [2**-8]
    # BLOOM-like heads that are no power of two: eight, and every second one of sixteen.
    assert alibi_slopes(12) == [*alibi_slopes(8), *(2 ** -(half / 2) for half in (1, 3, 5, 7))]


def test_bytes_are_those_of_the_visible_numbers_and_products_are_none() -> None:
    for seed in range(60):
        one = random_case(seed)
        without = replace(one, alibi=False, bias=None)
        hidden = hidden_keys(one, 0, one.q_len, CPU)
        assert unmasked_pairs(one) == int((~hidden).sum())
        numbers = {None: 0, "shared": 1, "heads": one.q_heads}[one.bias] * int((~hidden).sum())
        for direction in ("forward", "backward", "step"):
            assert flops(one, direction) == flops(without, direction)
            saved = compulsory_bytes(one, direction, saves_lse=True)
            assert saved - compulsory_bytes(without, direction, saves_lse=True) == 4 * numbers


def eager(case: Case, inputs: Inputs, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the formula's results in the case's dtype with this bias, which may be a wrong one."""
    mask = None if case.dense else hidden_keys(case, 0, case.q_len, CPU)
    calls = calls_of(partial(formula, case, mask, bias=bias), inputs)
    out = calls.forward()
    gradients = torch.autograd.grad(out, inputs.leaves, inputs.d_out)
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))


SCORES: list[dict[str, Any]] = [{"alibi": True}, {"bias": "heads"}, {"bias": "shared"}]
# A CPU takes its time for products of float16.
VERDICTS = [*itertools.product([128], ["float32", "bfloat16", "float16"], SCORES)]
VERDICTS += [*itertools.product([600], ["float32", "bfloat16"], SCORES[:2])]


@pytest.mark.parametrize(("q_len", "dtype", "score"), VERDICTS)
def test_a_verdict_finds_what_is_wrong(q_len: int, dtype: str, score: dict[str, Any]) -> None:
    one = case(dtype=dtype, head_dim=32, batch=1, q_len=q_len, kv_len=q_len, causal=q_len == 600, **score)
    inputs = make_inputs(one, "cpu", 3, with_gradients=True)
    wanted = expected(one, inputs, with_gradients=True, sampled=True)
    bias = bias_tensor(one, CPU, inputs.q_bhsd.dtype)
    assert bias is not None

    def wrong(results: dict[str, torch.Tensor]) -> str | None:
        return verdict(one, inputs, wanted, results, {}).wrong

    assert wrong(eager(one, inputs, bias)) is None
    mistakes = [None, bias * 1.1, bias.roll(1, -1), bias.roll(1, -2) if one.bias else -bias]
    mistakes += [bias.roll(1, 1)] if bias.shape[1] > 1 else []
    for mistake in mistakes:
        assert wrong(eager(one, inputs, mistake)) is not None


@pytest.mark.parametrize("seed", range(0, 30, 6))
def test_flex_modifies_scores_alike(seed: int) -> None:
    one = replace(random_case(seed), sink=False)
    inputs = make_inputs(one, "cpu", seed, with_gradients=False)
    found = flex_function(one, CPU, {})(*inputs.qkv)
    assert off(found, reference(one, inputs, with_gradients=False, precision=torch.float64)["out"]) < 1e-5
