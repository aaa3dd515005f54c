"""The rows that a judgement looks at: which, how many, drawn anew, and what an error in them comes to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_exp.attention import sampling
from attn_exp.attention.expected import expected
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.reference import reference
from attn_exp.attention.sampled import sampled_reference
from attn_exp.attention.sampling import GROUP, boundary_rows, draw_rows, sampled_length
from attn_exp.attention.verdict import verdict
from attn_exp.core.case.case import Case

DOCS = Path(__file__).parents[1] / "docs"
CASE = Case(
    batch=2, q_heads=4, kv_heads=2, q_len=600, kv_len=600, head_dim=32, value_dim=16, dtype="bfloat16"
)  # fmt: skip
CASES = [
    CASE,
    replace(CASE, causal=True),
    replace(CASE, causal=True, window=100, layout="bshd"),
    replace(CASE, softcap=3.0),
    replace(CASE, causal=True, kv_len=700),
    replace(CASE, causal=True, kv_len=500),
    replace(CASE, causal=True, kv_len=200, window=20, align="top_left"),
    replace(CASE, batch=1, lengths=(100, 300, 200), causal=True),
    replace(CASE, batch=1, lengths=(100, 300, 200)),
    replace(CASE, dtype="float8_e4m3fn"),
    replace(CASE, dtype="float32", kv_len=100),
]


@pytest.fixture
def small_is_large(monkeypatch):
    monkeypatch.setattr(sampling, "_LEAST_SCORES", 1)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("case", CASES, ids=Case.label)
def test_a_sampled_reference_is_the_whole_one_at_its_rows_and_changes_no_input(case, with_gradients):
    inputs = make_inputs(case, "cpu", 3, with_gradients=with_gradients and not case.quantised)
    before = [tensor.detach().float().clone() for tensor in (*inputs.qkv, inputs.d_out_bhsd)]
    whole = reference(case, inputs, with_gradients=with_gradients)
    part = sampled_reference(case, inputs, with_gradients=with_gradients, places=None)
    assert set(part.tensors) == set(whole)
    for name, tensor in part.tensors.items():
        wanted = part.places[name].of(whole[name])
        assert tensor.shape == wanted.shape
        assert (tensor - wanted).norm() <= 3e-6 * wanted.norm(), name
    after = [tensor.detach().float() for tensor in (*inputs.qkv, inputs.d_out_bhsd)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert 3.5 < part.largest_score < 8


def test_two_judgements_look_at_different_rows_and_both_at_the_boundaries(small_is_large):
    inputs = make_inputs(CASE, "cpu", 3, with_gradients=True)
    first, second = (expected(CASE, inputs, with_gradients=True, sampled=True) for _ in range(2))
    for name in ("dq", "dk", "dv"):
        assert not torch.equal(first.places[name].rows, second.places[name].rows)
    assert not torch.equal(*first.places["dq"].rows[:2]), "each head has its own"
    for place in (first.places["dq"].rows, second.places["dk"].rows):
        assert place.shape[-1] == sampled_length(600)
        assert all((place == row).any(-1).all() for row in (0, 63, 64, 127, 128, 255, 256, 575, 576, 598, 599))
        assert (place.diff(dim=-1) > 0).all(), "ascending, none twice"
        assert place.diff(dim=-1).max() < 2 * GROUP + len(boundary_rows(600)), "no tile without a row"


def test_small_cases_and_short_tensors_are_looked_at_whole(monkeypatch):
    inputs = make_inputs(CASE, "cpu", 3, with_gradients=False)
    assert not expected(CASE, inputs, with_gradients=False, sampled=True).places
    monkeypatch.setattr(sampling, "_LEAST_SCORES", 1)
    decoding = replace(CASE, q_len=1)
    whole = expected(
        decoding, make_inputs(decoding, "cpu", 3, with_gradients=False), with_gradients=False, sampled=True
    )
    assert (bool(whole.places), whole.rows, whole.rows_of, whole.heads) == (False, 8, 8, 8)
    assert not expected(CASE, inputs, with_gradients=False).places, "unless asked for"
    part = expected(CASE, inputs, with_gradients=False, sampled=True)
    assert (bool(part.places), part.rows, part.rows_of, part.heads) == (True, 8 * sampled_length(600), 8 * 600, 8)


def test_a_verdict_is_on_all_tensors_of_a_call(small_is_large):
    inputs = make_inputs(CASE, "cpu", 3, with_gradients=True)
    tensors = {name: one.bfloat16() for name, one in reference(CASE, inputs, with_gradients=True).items()}
    judge = expected(CASE, inputs, with_gradients=True, sampled=True)
    found = verdict(CASE, inputs, judge, tensors, {})
    assert found.wrong is None
    assert set(found.errors) == {"out", "dq", "dk", "dv"}
    assert (found.rows, found.rows_of, found.heads) == (8 * 2 * 91 + 2 * 4 * 91, 16 * 600 + 2 * 4 * 600, 8)
    wrong = verdict(CASE, inputs, judge, tensors | {"dk": tensors["dv"].repeat(1, 1, 1, 2)}, {}).wrong
    assert wrong.startswith("dk is off by")


def formula_in_16_bits(case, inputs):
    out = torch.nn.functional.scaled_dot_product_attention(
        *inputs.qkv, is_causal=case.causal, enable_gqa=case.kv_heads != case.q_heads
    )
    gradients = torch.autograd.grad(out, inputs.qkv, inputs.d_out_bhsd)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def chance(rows, judgements=1):
    """The closed form: the probability that one of some judgements looks at one of some rows in groups of their own."""
    return 1 - (1 - 1 / GROUP) ** (rows * judgements)


DRAWS = 20_000


@pytest.mark.parametrize(("rows", "judgements"), [((5,), 1), ((5, 25, 45, 80), 2)])
def test_wrong_rows_are_found_with_the_probability_of_the_closed_form(rows, judgements):
    drawn = draw_rows(DRAWS * judgements, 256).unflatten(0, (DRAWS, judgements))
    found = torch.stack([(drawn == row).any(-1) for row in rows]).any(0).any(-1).double().mean().item()
    expected_share = chance(len(rows), judgements)
    assert abs(found - expected_share) < 7 * (expected_share * (1 - expected_share) / DRAWS) ** 0.5


def test_a_wrong_tile_or_head_is_always_found_and_the_page_has_these_figures():
    for length in (2048, 8192):
        drawn = draw_rows(50, length)
        for first in range(0, length - 64, 37):
            assert ((drawn >= first) & (drawn < first + 64)).any(-1).all(), "64 rows anywhere"
    page = " ".join((DOCS / "checks.md").read_text().split())
    one, sixteen = (f"{100 * chance(rows):.3g} %" for rows in (1, 16))
    assert f"one wrong row of a head with a probability of {one}, 16 of them with {sixteen}, and 64 neighbours" in page
