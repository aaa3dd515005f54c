"""The filter language: what an expression selects, and the errors for invalid ones."""

import operator

import pytest
import sweeps
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_exp.comparison.answer import chosen
from attn_exp.core.errors import UserError
from attn_exp.results.cell import ChosenMetric, cells_of


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    records = [
        sweeps.job(backend, of=sweeps.case(seq_len=length, causal=causal), flags=("drift",) if length > 1024 else ())
        for backend in ("flash", "cudnn")
        for length in (512, 1024, 4096)
        for causal in (True, False)
    ]
    records.append(sweeps.job("größe", of=sweeps.case(batch=1, seq_len=2048, causal=False, lengths=(512, 1536))))
    records += [sweeps.failed(backend="math"), sweeps.job("flex", options={"block": 64}, of=sweeps.case(q_len=1))]
    return cells_of(sweeps.sweep(tmp_path_factory.mktemp("where") / "s", records).results, ChosenMetric())


@pytest.mark.parametrize(
    ("expression", "meaning"),
    [
        ("causal and seq_len >= 4096", lambda c: c.result.case.causal and c.result.case.kv_len >= 4096),
        ("backend == flash", lambda c: c.result.label == "flash"),
        ("'flash' == backend", lambda c: c.result.label == "flash"),
        ("not causal", lambda c: not c.result.case.causal),
        ("backend in (flash, math)", lambda c: c.result.label in ("flash", "math")),
        ("backend not in (flash, math)", lambda c: c.result.label not in ("flash", "math")),
        ("pass == backward", lambda c: c.direction == "backward"),
        ("drift", lambda c: "drift" in c.result.flags),
        ("q_len == kv_len", lambda c: c.result.case.square),
        ("window == none and batch = 4", lambda c: c.result.case.batch == 4),
        ("forward/time_us > 1e1", lambda c: c.result.status == "ok"),
        ("time_us > 200", lambda c: c.direction == "backward" and c.result.status == "ok"),
        ("time_us == none", lambda c: c.result.status != "ok"),
        ("lengths == '[512,1536]'", lambda c: c.result.case.lengths is not None),
        ("backend in (größe, flash)", lambda c: c.result.label in ("größe", "flash")),
        (f"kv_len < {'9' * 5000}", lambda c: True),
        (f"{'(' * 99}causal{')' * 99}", lambda c: c.result.case.causal),
        ("backend.block >= 64", lambda c: c.result.label == "flex"),
        ("not (causal or backend == cudnn)", lambda c: not (c.result.case.causal or c.result.label == "cudnn")),
        ("causal or drift and backend == flash", lambda c: c.result.case.causal or (
            "drift" in c.result.flags and c.result.label == "flash")),
    ],
)  # fmt: skip
def test_an_expression_selects_cells(cells, expression, meaning):
    assert chosen(cells, expression) == [cell for cell in cells if meaning(cell)]


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "it cannot be read"),
        ("causal and", "it cannot be read"),
        ("(causal", "it cannot be read"),
        ("backend in flash", r"a '\(' is missing"),
        ("causal not 3", "it cannot be read"),
        ("bach > 3", "names an unknown field 'bach': did you mean 'batch'"),
        ("backend == flsh", "backend is never 'flsh': did you mean 'flash'"),
        ("1 < 2", "a condition needs a field"),
        ("batch > 'four'", "compares a number with text, batch is 4;"),
        ("causal >= 1", "compares true or false with a number, causal is True;"),
        ("q_len ** 2 > 4", "is not supported"),
        ("__import__('os').system('true')", "is not supported"),
        ("backend == flash cudnn", "it cannot be read"),
        ("causal #", "'#' is not supported"),
        ("batch > 3\0or causal", r"'\\x00or causal' is not supported"),
        ("größer > 3", "names an unknown field 'größer'"),
        ("backend(3)", r"'backend\(3\)' is not supported"),
        ("backend in ()", r"'\(\)' is not supported"),
        ("lengths == two", r"lengths is never 'two': its values are \[512,1536\]"),
        ("batch == 4 or " * 20_000 + "causal", "has 280,006 characters; the limit is 10,000"),
        ("(not " * 99 + "causal" + ")" * 99, "nested too deeply"),
        ("batch > 4096", "matches none of"),
    ],
)
def test_an_invalid_filter_gives_one_sentence(cells, expression, words):
    with pytest.raises(UserError, match=words) as caught:
        chosen(cells, expression)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


COMPARE = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
           ">=": operator.ge}  # fmt: skip
atoms = st.one_of(
    st.tuples(st.just("length"), st.sampled_from(sorted(COMPARE)), st.sampled_from([512, 1000, 4096])),
    st.just(("causal",)),
    st.tuples(st.just("backend"), st.sampled_from(["flash", "cudnn", "math"])),
)
trees = st.recursive(
    atoms,
    lambda inner: (
        st.tuples(st.just("not"), inner)
        | st.tuples(st.sampled_from(["and", "or"]), inner, inner)
        | st.tuples(st.just("same"), inner)
    ),
    max_leaves=8,
)


def typed(tree):
    match tree:
        case ("length", sign, number):
            return f"kv_len {sign} {number}"
        case ("causal",):
            return "causal"
        case ("backend", name):
            return f"backend == {name}"
        case ("not", inner):
            return f"not ({typed(inner)})"
        case ("same", inner):
            return f"({typed(inner)})"
        case (word, one, other):
            return f"({typed(one)}) {word} ({typed(other)})"


def holds(tree, cell):
    match tree:
        case ("length", sign, number):
            return COMPARE[sign](cell.result.case.kv_len, number)
        case ("causal",):
            return cell.result.case.causal
        case ("backend", name):
            return cell.result.label == name
        case ("not", inner):
            return not holds(inner, cell)
        case ("same", inner):
            return holds(inner, cell)
        case ("and", one, other):
            return holds(one, cell) and holds(other, cell)
        case ("or", one, other):
            return holds(one, cell) or holds(other, cell)


@settings(max_examples=150)
@given(trees)
def test_any_tree_means_what_it_says(cells, tree):
    wanted = [cell for cell in cells if holds(tree, cell)]
    if not wanted:
        with pytest.raises(UserError, match="matches none"):
            chosen(cells, typed(tree))
    else:
        assert chosen(cells, typed(tree)) == wanted
