"""The programs that a hunt writes compute attention as the reference does, for every kind of case."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import Planted

from attn_exp.attention import hard_values
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.reference import reference_attention
from attn_exp.backends.eager import Eager
from attn_exp.backends.fa2 import FlashAttention2
from attn_exp.backends.flex import Flex
from attn_exp.backends.sdpa import Flash, Priority, Sdpa
from attn_exp.backends.supports import Supports
from attn_exp.core.case import NORMAL, Case
from attn_exp.core.hunting import KINDS, Example, Outcome, Space
from attn_exp.hunt.own_function import source_of
from attn_exp.hunt.script import MOST_LINES, script_of
from attn_exp.hunt.space import Examples
from attn_exp.hunt.values import inputs_of

SOME = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SMALL = "q_len <= 40 and kv_len <= 40 and inputs = normal"
CASE = Case(
    batch=2, q_heads=4, kv_heads=2, q_len=7, kv_len=9, head_dim=16, value_dim=16, dtype="float32", causal=True,
    align="top_left",
)  # fmt: skip
NAMES = ("out", "dq", "dk", "dv")


def of(backend, where=SMALL, **more):
    # Programs of sinks are not written.
    supports = replace(backend.supports, devices=("cpu",), sink=False, **more)
    return Examples(supports, Space(where), "cpu").small()


def wrong(tensor="out", allowed=0.05, **more):
    return Outcome(status="inaccurate", reason="out is off", tensor=tensor, off=1.0, allowed=allowed, **more)


def code_of(text):
    """The exit code of a program, run here."""
    with pytest.raises(SystemExit) as ended:
        exec(compile(text, "bug.py", "exec"), {"__name__": "__main__", "__file__": "bug.py"})
    return int(ended.value.code)


def exits(backend, example, tensor):
    script = script_of(backend, example, wrong(tensor), "cpu")
    assert script.text and not script.why_not, script
    assert len(script.text.splitlines()) <= MOST_LINES
    assert "attn_exp" not in script.text
    return code_of(script.text)


# The errors that a program may compute, and a bound on each that float32 keeps.
ERRORS = {"relative": 1e-3, "worst_row": 1e-3, "own_row": 1e-2, "worst_tile": 1e-2, "bias": 1e-3, "least_row": 0.25}


@SOME
@given(of(Eager), st.sampled_from(NAMES), st.sampled_from(sorted(ERRORS)))
def test_the_formula_of_a_program_is_right_and_a_wrong_result_is_seen(example, tensor, error):
    example = replace(example, case=replace(example.case, dtype="float32"), backward=tensor != "out")
    of_error = {"error": error, "least_norm": 0.25, "vanishing": (1e-4, 1.0)}
    script = script_of(Eager("eager"), example, wrong(tensor, ERRORS[error], **of_error), "cpu")
    assert len(script.text.splitlines()) <= MOST_LINES
    if not script.text:
        assert "lines: run the overrides" in script.why_not
        return
    vanishes = tensor in ("dq", "dk") and error in ("bias", "least_row")
    assert vanishes or code_of(script.text) == 0
    worse = "def candidate(q, k, v):\n    return -formula(q, k, v)"
    # Gradients of q and k vanish where a query sees one key.
    assert tensor in ("dq", "dk") or code_of(script.text.replace("candidate = formula", worse)) == 1


@SOME
@given(of(Flash), st.sampled_from(NAMES), st.sampled_from([Flash, Sdpa, Priority]))
def test_sdpa_is_called_as_its_backend_calls_it(example, tensor, backend):
    example = replace(example, backward=tensor != "out")
    made = backend("b", ["math", "flash"]) if backend is Priority else backend("b")
    assert exits(made, example, tensor) == 0


def test_flex_attention_is_called_as_its_backend_calls_it(monkeypatch):
    # Not compiled: what is tested are its arguments.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    @SOME
    @given(of(Flex, f"{SMALL} and not backward and dtype=fp32"))
    def test(example):
        assert exits(Flex("flex"), example, "out") == 0

    test()


def test_flash_attn_is_called_as_its_backend_calls_it(monkeypatch):
    def function(q, k, v, *, starts=None, causal, window_size, softcap):
        """Stands for flash_attn's functions, by their documentation."""
        left, right = window_size
        packed = starts is not None
        q, k, v = ((t[None] if packed else t).transpose(1, 2) for t in (q, k, v))
        sizes = {"batch": q.shape[0], "q_heads": q.shape[1], "kv_heads": k.shape[1], "q_len": q.shape[2]}
        case = Case(
            **sizes, kv_len=k.shape[2], head_dim=q.shape[3], value_dim=v.shape[3], dtype="float32", causal=causal,
            window=None if left < 0 else left + 1, softcap=softcap or None,
            lengths=tuple(starts.diff().tolist()) if packed else None,
        )  # fmt: skip
        assert right == (0 if causal else -1)
        out = reference_attention(case)(q.float(), k.float(), v.float()).to(q.dtype).transpose(1, 2)
        return out[0] if packed else out

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        return function(q, k, v, starts=cu_seqlens_k, **options)

    package, module = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    module.flash_attn_func = lambda *tensors, deterministic=False, **options: function(*tensors, **options)
    module.flash_attn_varlen_func = lambda *tensors, deterministic=False, **options: varlen(*tensors, **options)
    for one in (package, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)

    @SOME
    @given(of(FlashAttention2))
    def test(example):
        assert exits(FlashAttention2("fa2"), example, "out") == 0

    test()


@pytest.mark.parametrize("where", ["q", "k", "v", "whole"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_large_offsets_are_made_as_the_search_makes_them(where, layout):
    example = Example(case=replace(CASE, kv_heads=4, layout=layout), large=where)
    place = {"place": (1, 3)} if where == "whole" else {}
    script = script_of(Flash("flash"), example, wrong(allowed=1e-5, **place), "cpu")
    assert code_of(script.text) == 0
    assert len(script.text.splitlines()) <= MOST_LINES


def test_the_kinds_of_values_are_those_that_there_are():
    assert (NORMAL, *hard_values.KINDS) == KINDS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hard_values_are_written_down_as_they_are(dtype):
    example = Example(case=replace(CASE, dtype=dtype, layout="bshd"), inputs="sharp", seed=3)
    script = script_of(Eager("eager"), example, wrong(), "cpu")
    assert len(script.text.splitlines()) <= MOST_LINES
    lines = script.text.splitlines()
    made = {}
    exec("\n".join(lines[: lines.index("out = candidate(q, k, v)")]), made)
    inputs = inputs_of(example, "cpu")
    for name, tensor in zip(("q", "k", "v", "d_out"), (*inputs.qkv, inputs.d_out_bhsd), strict=True):
        assert torch.equal(made[name], tensor) and made[name].stride() == tensor.stride()


def test_fp8_and_calls_that_need_this_package_say_why_there_is_no_program():
    def closes_over(made):
        return lambda q, k, v: made(q, k, v)

    assert "a Linear that cannot be written down" in source_of(closes_over(torch.nn.Linear(1, 1)))
    assert source_of(None) == "the backend gives no function of q, k and v (Calls.attention)"
    assert "named arguments" not in str(source_of(Planted("p").prepare(CASE, _inputs()).attention))


def _inputs():
    return make_inputs(CASE, "cpu", 1, with_gradients=False)


def _half(x):
    """A function that another one here uses."""
    return x * FACTOR


FACTOR = 0.5


def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """It is in a module that imports attn_exp, so that it is copied."""
    return torch.softmax(_half(q) @ k.mT * scale, -1) @ v


def test_a_function_of_the_backends_module_is_copied_with_what_it_uses():
    from functools import partial

    imports, lines = source_of(partial(own, scale=2.0))
    space = {"torch": torch}
    exec("\n".join([*imports, *lines]), space)
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    assert torch.equal(space["candidate"](q, k, v), own(q, k, v, scale=2.0))
    assert "attn_exp" not in "\n".join(lines)


def test_everything_is_a_restriction_that_examples_keep():
    where = "head_dim in (24, 64) and kv_len > 100 and kv_len != 128 and (causal or softcap = 5) and not packed"
    everything = Supports(
        devices=("cpu",),
        dtypes=("float32", "bfloat16"),
        window=True,
        prefix=True,
        chunk=True,
        softcap=True,
        packed=True,
    )
    strategy = Examples(everything, Space(where), "cpu").small()

    @SOME
    @given(strategy)
    def test(example):
        case = example.case
        assert case.head_dim in (24, 64) and case.kv_len > 100 and case.kv_len != 128
        assert case.causal or case.softcap == 5
        assert case.lengths is None

    test()
