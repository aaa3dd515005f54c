"""The rows that a judgement looks at: which, how many, drawn anew, and what an error in them comes to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_exp.attention import sampling, tolerance
from attn_exp.attention.error import inaccuracy
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.reference import reference
from attn_exp.attention.sampled import sampled_reference
from attn_exp.attention.sampling import GROUP, boundary_rows, draw_rows, rows_of, sampled_length
from attn_exp.attention.tolerance import expected
from attn_exp.attention.verdict import malformed, verdict
from attn_exp.core.case import Case

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
    part = sampled_reference(case, inputs, with_gradients=with_gradients)
    assert set(part.tensors) == set(whole)
    for name, tensor in part.tensors.items():
        wanted = rows_of(whole[name], part.places[name]) if name in part.places else whole[name]
        assert tensor.shape == wanted.shape
        assert (tensor - wanted).norm() <= 3e-6 * wanted.norm(), name
    after = [tensor.detach().float() for tensor in (*inputs.qkv, inputs.d_out_bhsd)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert 3.5 < part.largest_score < 8


def test_two_judgements_look_at_different_rows_and_both_at_the_boundaries(small_is_large):
    inputs = make_inputs(CASE, "cpu", 3, with_gradients=True)
    first, second = (expected(CASE, inputs, with_gradients=True, sampled=True) for _ in range(2))
    for name in ("dq", "dk", "dv"):
        assert not torch.equal(first.places[name], second.places[name])
    assert not torch.equal(first.places["dq"][0, 0], first.places["dq"][0, 1]), "each head has its own"
    for place in (first.places["dq"], second.places["dk"]):
        assert place.shape[-1] == sampled_length(600)
        assert all((place == row).any(-1).all() for row in (0, 63, 64, 127, 128, 255, 256, 575, 576, 598, 599))
        assert (place.diff(dim=-1) > 0).all(), "ascending, none twice"
        assert place.diff(dim=-1).max() < 2 * GROUP + len(boundary_rows(600)), "no tile without a row"


def test_a_seed_changes_nothing_about_what_is_drawn():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(draw_rows(1, 2, 4096))
    assert not torch.equal(*drawn)


def test_small_cases_and_short_tensors_are_looked_at_whole(monkeypatch):
    inputs = make_inputs(CASE, "cpu", 3, with_gradients=False)
    assert not expected(CASE, inputs, with_gradients=False, sampled=True).sampled
    monkeypatch.setattr(sampling, "_LEAST_SCORES", 1)
    decoding = replace(CASE, q_len=1)
    whole = expected(
        decoding, make_inputs(decoding, "cpu", 3, with_gradients=False), with_gradients=False, sampled=True
    )
    assert (whole.sampled, whole.rows, whole.rows_of, whole.heads) == (False, 8, 8, 8)
    assert not expected(CASE, inputs, with_gradients=False).sampled, "unless asked for"
    part = expected(CASE, inputs, with_gradients=False, sampled=True)
    assert (part.sampled, part.rows, part.rows_of, part.heads) == (True, 8 * sampled_length(600), 8 * 600, 8)


def test_tolerances_of_an_earlier_reference_are_not_measured_again(monkeypatch):
    inputs = make_inputs(CASE, "cpu", 3, with_gradients=True)
    known = expected(CASE, inputs, with_gradients=True)
    monkeypatch.setattr(tolerance, "measured_tolerances", None)
    again = expected(CASE, inputs, with_gradients=True, tolerances=known.tolerances)
    assert again.tolerances is known.tolerances
    assert again.largest_score == known.largest_score > 4


def test_a_sampled_judgement_reads_its_rows_alone_and_all_of_them(small_is_large):
    case = replace(CASE, dtype="float32")
    inputs = make_inputs(case, "cpu", 3, with_gradients=True)
    right = reference(case, inputs, with_gradients=True)
    judge = expected(case, inputs, with_gradients=True, sampled=True)
    for name, place in judge.places.items():
        spoiled = torch.full_like(right[name], float("nan"))
        spoiled.scatter_(2, place.unsqueeze(-1).expand(*place.shape, spoiled.shape[-1]), rows_of(right[name], place))
        assert inaccuracy({name: judge.judge(name, spoiled)}) is None
        for head, row in ((0, 0), (-1, -1), (0, 7)):
            wrong = right[name].clone()
            wrong[head, head, place[head, head, row]] = 0
            assert inaccuracy({name: judge.judge(name, wrong)}), (name, head, row)
        with pytest.raises(ValueError, match="the shape is"):
            judge.judge(name, right[name][:, :, 1:])


def test_a_verdict_is_on_all_tensors_of_a_call(small_is_large):
    inputs = make_inputs(CASE, "cpu", 3, with_gradients=True)
    tensors = {name: one.bfloat16() for name, one in reference(CASE, inputs, with_gradients=True).items()}
    judge = expected(CASE, inputs, with_gradients=True, sampled=True)
    found = verdict(CASE, inputs, judge, tensors, {})
    assert found.wrong is None
    assert set(found.of_pass("forward")) == {"out"} and set(found.of_pass("backward")) == {"dq", "dk", "dv"}
    assert (found.rows, found.rows_of, found.heads) == (8 * (600 + 91) + 2 * 4 * 91, 16 * 600 + 2 * 4 * 600, 8)
    wrong = verdict(CASE, inputs, judge, tensors | {"dk": tensors["dv"].repeat(1, 1, 1, 2)}, {}).wrong
    assert wrong.startswith("dk is off by")


class Lazy(torch.Tensor):
    """A tensor that could compute when it is read."""


def test_a_result_of_another_form_is_told_so():
    like = torch.zeros(1, dtype=torch.bfloat16)
    right = torch.zeros(2, 3, dtype=torch.bfloat16)

    def said(result, like=like, scales=None):
        return malformed("out", result, shape=(2, 3), like=like, scales=scales or {})

    assert said(right) is None
    assert said(right.clone().requires_grad_()) is None
    assert said(right.mT.contiguous().mT) is None, "strides are free"
    assert said([right]) == "out is no torch.Tensor but of type builtins.list"
    assert "of type test_sampling.Lazy, a subclass of torch.Tensor" in said(right.as_subclass(Lazy))
    assert "of type torch.nn.parameter.Parameter" in said(torch.nn.Parameter(right))
    assert said(right.mT) == "the shape of out is (3, 2), not (2, 3)"
    assert said(right.half()) == "the dtype of out is float16, not bfloat16"
    assert said(right.to("meta")) == "out is on meta, not on cpu"
    assert said(right.to_sparse()) == "the layout of out is torch.sparse_coo, not torch.strided"
    codes = like.to(torch.float8_e4m3fn)
    assert said(right, codes) is None
    assert said(right.to(torch.float8_e4m3fn), codes) == "out is in codes without a scale"
    assert said(right.to(torch.float8_e4m3fn), codes, {"out": 2.0}) is None
    assert said(right.to(torch.float8_e5m2), codes) == "the dtype of out is float8_e5m2, not float8_e4m3fn"


def chance(rows, judgements=1):
    """The closed form: the probability that one of some judgements looks at one of some rows in groups of their own."""
    return 1 - (1 - 1 / GROUP) ** (rows * judgements)


DRAWS = 20_000


def test_each_row_is_looked_at_as_often_as_every_other_and_boundaries_always():
    drawn = draw_rows(DRAWS, 1, 256).flatten()
    share = torch.bincount(drawn, minlength=256).double() / DRAWS
    always = boundary_rows(256)
    assert (share[always] == 1).all()
    others = torch.tensor([row not in always for row in range(256)])
    # The last group has fewer rows, and each of them a larger chance.
    others[-(int(others.sum()) % GROUP or GROUP) - 40 :] = False
    # Seven standard errors: beyond them once in 4e11 rows.
    noise = (chance(1) * (1 - chance(1)) / DRAWS) ** 0.5
    assert ((share[others] - chance(1)).abs() < 7 * noise).all()


@pytest.mark.parametrize(("rows", "judgements"), [((5,), 1), ((5,), 3), ((5, 25, 45, 80), 1), ((5, 25, 45, 80), 2)])
def test_wrong_rows_are_found_with_the_probability_of_the_closed_form(rows, judgements):
    drawn = draw_rows(DRAWS, judgements, 256)
    found = torch.stack([(drawn == row).any(-1) for row in rows]).any(0).any(-1).double().mean().item()
    expected_share = chance(len(rows), judgements)
    assert abs(found - expected_share) < 7 * (expected_share * (1 - expected_share) / DRAWS) ** 0.5


def test_a_wrong_tile_or_head_is_always_found_and_the_page_has_these_figures():
    drawn = draw_rows(1000, 1, 4096)
    for first in range(0, 4096 - 64, 37):
        assert ((drawn >= first) & (drawn < first + 64)).any(-1).all(), "64 rows anywhere"
    page = (DOCS / "accuracy.md").read_text()
    for rows in (1, 4, 16):
        shares = " | ".join(f"{100 * chance(rows, judgements):.3g} %" for judgements in (1, 2, 10))
        assert f"| {shares} |" in page, (rows, shares)
