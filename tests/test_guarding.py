"""attn_exp.assert_not_slower and assert_correct: from Python, and by pytest's fixture and marker."""

import importlib.metadata
import math
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps
import torch
from torch.nn.functional import scaled_dot_product_attention

import attn_exp
from attn_exp.api.guarded import verdict_of
from attn_exp.core.errors import UserError
from attn_exp.core.record.record import Timing

CASE = (
    "batch=1 model.q_heads=4 model.kv_heads=4 seq_len=256 model.head_dim=32 model.value_dim=32 dtype=fp32 causal=false "
    "device=cpu"
)
BRIEF = {"min_rounds": 2, "max_rounds": 2, "budget_s": 0.01}


def plain(q, k, v):
    return scaled_dot_product_attention(q, k, v)


def equal(q, k, v):
    return scaled_dot_product_attention(q, k, v)


def half_more(q, k, v):
    """Half of the heads are computed twice."""
    out, half = scaled_dot_product_attention(q, k, v), slice(q.shape[1] // 2)
    out[:, half].copy_(scaled_dot_product_attention(q[:, half], k[:, half], v[:, half]))
    return out


def doubled(q, k, v):
    return 2 * scaled_dot_product_attention(q, k, v)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 64, 32, generator=generator) for _ in range(3))


def test_half_more_work_is_slower_and_equal_work_is_not():
    with pytest.raises(AssertionError, match=r"half_more takes [\d.]+ times as long as plain \[95 % CI: .*slower by"):
        attn_exp.assert_not_slower(half_more, CASE, than=plain)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", attn_exp.UndecidedWarning)
        found = attn_exp.assert_not_slower(equal, CASE, than=plain, undecided="warn")
    # Other programs keep these processors busy, so that it may be undecided.
    assert found.verdict in ("not slower", "undecided")
    undecided = [str(one.message) for one in told if one.category is attn_exp.UndecidedWarning]
    assert undecided == ([str(found)] if found.verdict == "undecided" else [])
    assert all(not record.passes["forward"].timings[0].flags for record in found.records)


def rounds(name, ratio, noise, seed, flags=()):
    """A record whose rounds take `ratio` times 100 us, give or take."""
    draw = random.Random(seed)
    times = tuple(100 * ratio * math.exp(draw.gauss(0, noise)) for _ in range(40))
    record = sweeps.job(name, bwd_us=None, flags=flags)
    timing = Timing(timer="device", l2="cold", times_us=times, rounds=tuple(range(40)), stop_reason="max_rounds")
    return replace(record, passes={"forward": replace(record.passes["forward"], timings=(timing,))})


@pytest.mark.parametrize(
    ("ratio", "noise", "margin", "flags", "verdict", "said"),
    [
        (1.0, 0.005, 0.03, (), "not slower", "not slower by 3 %"),
        (0.9, 0.005, 0.03, (), "not slower", "not slower by 3 %"),
        (1.06, 0.005, 0.03, (), "slower", "slower by 3 % or more"),
        (1.02, 0.005, 0.03, (), "not slower", "not slower by 3 %"),
        (1.01, 0.1, 0.03, (), "undecided", "so it is undecided whether it is slower by 3 %: more rounds may decide"),
        # Where other programs ran, equal functions may differ by a quarter.
        (1.0, 0.005, 0.03, ("busy_host",), "undecided", "equal functions may differ by 25 % then"),
        (1.5, 0.02, 0.03, ("busy_host",), "slower", "slower by 25 % or more"),
        (1.0, 0.005, 0.5, ("shared_gpu",), "not slower", "not slower by 50 %"),
    ],
)
def test_the_interval_decides(ratio, noise, margin, flags, verdict, said):
    found = verdict_of((rounds("mine", ratio, noise, 1, flags), rounds("plain", 1.0, noise, 2)), margin)
    assert found.verdict == verdict and said in str(found), str(found)
    _, comparison = found.passes["forward"]
    assert comparison.low < comparison.effect < comparison.high
    assert comparison.effect == pytest.approx(ratio - 1, abs=noise)


def test_a_function_is_judged_and_a_wrong_one_is_no_rival():
    assert attn_exp.assert_correct(plain, tensors()).status == "ok"
    assert attn_exp.assert_correct(plain, CASE).record.request.case.kv_len == 256
    with pytest.raises(AssertionError, match=r"doubled is inaccurate on b1 h2 s64 d32 fp32 full: .*out is off by"):
        attn_exp.assert_correct(doubled, tensors())
    with pytest.raises(AssertionError, match="plain is inaccurate"):
        attn_exp.assert_correct(plain, tensors(), causal=True)
    for first, second in ((plain, doubled), (doubled, plain)):
        with pytest.raises(AssertionError, match="nothing can be compared, doubled is inaccurate"):
            attn_exp.assert_not_slower(first, tensors(), than=second, stopping=BRIEF)


@pytest.mark.parametrize(
    ("function", "case", "options", "message"),
    [
        (plain, CASE, {"margin": "much"}, "margin=much is no percentage"),
        (plain, CASE, {"undecided": "ignore"}, "undecided='ignore' is not known: write 'fail' or 'warn'"),
        (plain, CASE, {"than": 3}, "than is a int: give a function of q, k and v"),
        (None, CASE, {}, "the function is a NoneType: give a function of q, k and v"),
        (plain, "backend=flash", {}, "backend is no key of a case: .*its keys are model, dtype"),
        (plain, {"bacth": 2}, {}, "bacth is no key of a case: did you mean 'batch'"),
        (plain, "timer=cpu", {}, "timer is no part of a case but how to measure: give it as an argument, timer="),
        (plain, "dtype=fp8", {}, "a function of q, k and v cannot be told about float8"),
        (plain, CASE, {"causal": True}, "causal= and align= are for tensors of your own"),
        (plain, (1, 2), {}, r"the case has 2 tensors: give \(q, k, v\)"),
        (plain, CASE, {"batch": 8}, "batch is none of the choices stopping"),
        (plain, CASE, {"reference": plain, "scale": 0.1}, "reference= says what is right"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(function, case, options, message):
    with pytest.raises(UserError, match=message):
        attn_exp.assert_not_slower(function, case, **{"than": plain, **options})


SUITE = """
import pytest
from test_guarding import BRIEF, CASE, doubled, equal, plain, rounds

from attn_exp.api import guarded

pytestmark = pytest.mark.attn_exp(case=CASE, stopping=BRIEF)

@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    # Whatever the machine does.
    two, measure = (rounds("equal", 1.01, 0.1, 1), rounds("plain", 1.0, 0.1, 2)), guarded.measured_alike
    monkeypatch.setattr(guarded, "measured_alike", lambda jobs, *rest: two if jobs[1:] else measure(jobs, *rest))

def test_right(attn_exp):
    assert attn_exp.assert_correct(plain).status == "ok"

def test_wrong(attn_exp):
    attn_exp.assert_correct(doubled)

@pytest.mark.attn_exp(margin="4%")
def test_equal(attn_exp):
    assert attn_exp.assert_not_slower(equal, than=plain).verdict == "undecided"

@pytest.mark.attn_exp(undecided="fail")
def test_strict(attn_exp):
    attn_exp.assert_not_slower(equal, than=plain)

@pytest.mark.attn_exp(margn="3%")
def test_mistyped(attn_exp):
    attn_exp.assert_correct(plain)
"""
# pytest finds the plugin by its entry point, except in an environment that was installed before there was one.
INSTALLED = any(
    one.value == "attn_exp.pytest_plugin" for one in importlib.metadata.entry_points(group="pytest11", name="attn_exp")
)


def test_the_fixture_takes_the_marker_s_arguments_and_the_configuration_s(tmp_path):
    (tmp_path / "test_mine.py").write_text(SUITE)
    (tmp_path / "test_bare.py").write_text(
        "from test_guarding import plain\n\ndef test_bare(attn_exp):\n    attn_exp.assert_correct(plain)\n"
    )
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\nattn_exp_undecided = warn\npythonpath = {Path(__file__).parent}\naddopts = --strict-markers\n"
    )
    plugin = [] if INSTALLED else ["-p", "attn_exp.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *plugin, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    told = dict(reversed(line.split(" ", 1)) for line in ran.stdout.splitlines() if line.startswith(("PASSED", "FAIL")))
    ended = {name.split(" - ")[0].rpartition("::")[2]: word for name, word in told.items()}
    assert ended["test_right"] == ended["test_equal"] == "PASSED", ran.stdout
    assert ended["test_wrong"] == ended["test_strict"] == ended["test_bare"] == "FAILED", ran.stdout
    assert "AssertionError: doubled is inaccurate on b1 h4 s256 d32 fp32 full" in ran.stdout
    assert "margn is none of the choices" in ran.stdout
    assert "there is no case: give (q, k, v), or mark the test" in ran.stdout
    # The warning is about the test's own line.
    assert "UndecidedWarning: forward of " in ran.stdout and ": equal takes" in ran.stdout
    assert "guard.py" not in ran.stdout.partition("short test summary")[0].partition("warnings summary")[2]


def test_pytest_s_start_imports_neither_torch_nor_hydra():
    code = (
        "import sys, attn_exp.pytest_plugin; print({'torch', 'hydra', 'mlflow', 'msgspec', 'numpy'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
