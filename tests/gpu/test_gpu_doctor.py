import re

import pytest

from attn_exp.doctor import clock_checks as checks
from attn_exp.doctor.bench import open_bench
from attn_exp.doctor.run_checks import alarms_fire

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(scope="module")
def bench():
    return open_bench("cuda")


@pytest.mark.parametrize(
    "check", [checks.sleep_is_linear, checks.timers_agree, alarms_fire], ids=lambda one: one.__name__
)
def test_a_check_passes(bench, check):
    finding = check(bench)
    assert finding.passed, finding.seen


def test_equal_calls_are_equal_and_a_difference_is_found(bench, monkeypatch):
    monkeypatch.setitem(checks.COMPARISONS, "cuda", (10, 6, 4))
    for finding in (checks.equal_things_are_equal(bench), checks.differences_are_found(bench)):
        assert finding.passed, finding.seen


def test_a_job_and_a_plain_loop_run_one_kernel(bench, monkeypatch):
    monkeypatch.setattr(checks, "_LOOP_S", 1.0)
    seen = checks.a_plain_loop_takes_as_long(bench).seen
    # In so short a loop the clock may not have settled; another kernel takes half or twice as long.
    assert all(abs(float(percent)) < 10 for percent in re.findall(r"([+-][\d.]+) %", seen)), seen
    assert len(re.findall("a loop", seen)) == 2, seen
