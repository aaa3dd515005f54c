"""The rows that a judgement looks at: which, how many, drawn anew, and what an error in them comes to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attn_exp.attention.expected
from attn_exp.attention import head_sums, sampling
from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.reference import reference
from attn_exp.attention.sampled import sampled_reference
from attn_exp.attention.sampling import GROUP, boundary_rows, draw_heads, draw_rows, group_of, sampled_length
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


def test_a_seed_changes_nothing_about_what_is_drawn():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(draw_rows(2, 4096))
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
    monkeypatch.setattr(attn_exp.attention.expected, "measured_tolerances", None)
    again = expected(CASE, inputs, with_gradients=True, tolerances=known.tolerances)
    assert again.tolerances is known.tolerances
    assert again.largest_score == known.largest_score > 4


def test_a_sampled_judgement_reads_its_rows_alone_and_all_of_them(small_is_large):
    case = replace(CASE, dtype="float32")
    inputs = make_inputs(case, "cpu", 3, with_gradients=True)
    right = reference(case, inputs, with_gradients=True)
    judge = expected(case, inputs, with_gradients=True, sampled=True)
    for name, places in judge.places.items():
        spoiled = torch.full_like(right[name], float("nan")).flatten(0, 1)
        heads = places.heads[:, None]
        spoiled[heads, places.rows] = right[name].flatten(0, 1)[heads, places.rows]
        assert inaccuracy({name: judge.judge(name, spoiled.view_as(right[name]))}) is None
        for head, row in ((0, 0), (-1, -1), (0, 7)):
            wrong = right[name].clone()
            wrong.flatten(0, 1)[places.heads[head], places.rows[head, row]] = 0
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
    assert (found.rows, found.rows_of, found.heads) == (8 * 2 * 91 + 2 * 4 * 91, 16 * 600 + 2 * 4 * 600, 8)
    wrong = verdict(CASE, inputs, judge, tensors | {"dk": tensors["dv"].repeat(1, 1, 1, 2)}, {}).wrong
    assert wrong.startswith("dk is off by")


def formula_in_16_bits(case, inputs):
    out = torch.nn.functional.scaled_dot_product_attention(
        *inputs.qkv, is_causal=case.causal, enable_gqa=case.kv_heads != case.q_heads
    )
    gradients = torch.autograd.grad(out, inputs.qkv, inputs.d_out_bhsd)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_heads_whose_keys_have_no_reference_are_judged_by_their_sums(small_is_large, monkeypatch, causal):
    monkeypatch.setitem(sampling._SCORES_OF_KEYS, "cpu", 3 * 200 * 200 * 2)
    case = replace(CASE, batch=8, causal=causal, value_dim=32, q_len=200, kv_len=200)
    inputs = make_inputs(case, "cpu", 3, with_gradients=True)
    tensors = formula_in_16_bits(case, inputs)
    judge = expected(case, inputs, with_gradients=True, sampled=True)
    assert judge.leaves_heads_out and len(judge.places["dk"].heads) == 3
    assert len(judge.places["dq"].heads) == 8 * 4
    assert verdict(case, inputs, judge, tensors, {}).wrong is None
    unseen = next(head for head in range(16) if head not in judge.places["dk"].heads.tolist())
    place = divmod(unseen, 2)
    for name, said in (("dv", "dv of all keys does not sum to d_out"), ("dk", "dkT k is not qT dq")):
        for wrong in (torch.zeros_like, lambda tensor: 2 * tensor, lambda tensor: tensor * float("nan")):
            spoiled = tensors[name].clone()
            spoiled[place] = wrong(spoiled[place])
            found = verdict(case, inputs, judge, tensors | {name: spoiled}, {}).wrong
            assert found.startswith(f"{said} in head {place[1]} of batch row {place[0]}"), found
    # Rows of dv that are exchanged sum to the same.
    exchanged = tensors["dv"].clone()
    exchanged[place] = exchanged[place].flip(0)
    said = f"dvT v is not d_outT out in head {place[1]} of batch row {place[0]}"
    assert verdict(case, inputs, judge, tensors | {"dv": exchanged}, {}).wrong.startswith(said)
    gradients = {name: tensors[name] for name in ("dq", "dk")} | {"dv": exchanged}
    assert verdict(case, inputs, judge, gradients, {}, tensors["out"]).wrong.startswith(said)
    assert verdict(case, inputs, judge, gradients, {}).wrong is None


def test_the_sums_of_honest_gradients_stay_far_within_what_is_allowed():
    worst = 0.0
    small = replace(CASE, q_len=150, kv_len=150, value_dim=32)
    for seed in range(18):
        case = replace(small, dtype=("bfloat16", "float16", "float32")[seed % 3], causal=seed % 2 == 1)
        inputs = make_inputs(case, "cpu", seed, with_gradients=True)
        tensors = formula_in_16_bits(case, inputs)
        for allowed in (0.5, 0.1, 0.02, 0.004):
            relative = dict.fromkeys(tensors, allowed / 12)
            if head_sums.wrong_head(case, inputs, tensors, {}, relative) is not None:
                worst = max(worst, allowed)
                break
    assert worst < 0.02


@pytest.mark.parametrize("name", ["dk", "dv"])
@pytest.mark.parametrize("query", [0, 199])
def test_a_query_that_the_gradients_of_keys_lack_shows_in_the_sums(name, query):
    # Many query heads share the keys, so that one query is little: 0.9 % of the norm, allowed is 2 %.
    case = replace(CASE, batch=1, q_heads=32, kv_heads=2, q_len=200, kv_len=200, value_dim=32)
    inputs = make_inputs(case, "cpu", 3, with_gradients=True)
    tensors = formula_in_16_bits(case, inputs)
    judge = expected(case, inputs, with_gradients=True)
    assert verdict(case, inputs, judge, tensors, {}).wrong is None
    others = replace(inputs, d_out_bhsd=inputs.d_out_bhsd.clone())
    others.d_out_bhsd[:, 20, query] = 0
    lacking = reference(case, others, with_gradients=True)[name].bfloat16()
    assert judge.judge(name, lacking).relative < judge.tolerances[name].relative
    relative = {name: bounds.relative for name, bounds in judge.tolerances.items()}
    said = head_sums.wrong_head(case, inputs, tensors | {name: lacking}, {}, relative)
    wanted = "dv of all keys does not sum to d_out" if name == "dv" else "dkT k is not qT dq, as if one of them lacked"
    assert said.startswith(wanted) and "in head 1 of batch row 0" in said


def test_all_heads_are_drawn_where_they_are_affordable_and_others_each_time_where_they_are_not():
    assert draw_heads(5, 1 << 24, "cuda").tolist() == list(range(5))
    assert len(draw_heads(1000, 1 << 40, "cuda")) == 1
    drawn = [tuple(draw_heads(256, 1 << 26, "cuda").tolist()) for _ in range(20)]
    assert all(len(set(heads)) == 32 and sorted(heads) == list(heads) for heads in drawn)
    assert len(set(drawn)) == 20
    assert (group_of(600), group_of(2048), group_of(4096), group_of(1 << 20)) == (8, 8, 16, 32)


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
    drawn = draw_rows(DRAWS, 256).flatten()
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
    drawn = draw_rows(DRAWS * judgements, 256).unflatten(0, (DRAWS, judgements))
    found = torch.stack([(drawn == row).any(-1) for row in rows]).any(0).any(-1).double().mean().item()
    expected_share = chance(len(rows), judgements)
    assert abs(found - expected_share) < 7 * (expected_share * (1 - expected_share) / DRAWS) ** 0.5


def test_a_wrong_tile_or_head_is_always_found_and_the_page_has_these_figures():
    for length in (2048, 8192):
        drawn = draw_rows(50, length)
        for first in range(0, length - 64, 37):
            assert ((drawn >= first) & (drawn < first + 64)).any(-1).all(), "64 rows anywhere"
    page = (DOCS / "accuracy.md").read_text()
    for rows in (1, 4, 16):
        shares = " | ".join(f"{100 * chance(rows, judgements):.3g} %" for judgements in (1, 2, 10))
        assert f"| {shares} |" in page, (rows, shares)
