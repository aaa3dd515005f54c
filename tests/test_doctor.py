import contextlib
import os
import pty
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from cli import environment

from attn_exp.commands.doctor import main
from attn_exp.doctor import clock_checks as verdicts
from attn_exp.doctor import run_checks as alarms
from attn_exp.doctor import run_checks as doctor
from attn_exp.doctor.bench import Bench, Finding, attention, open_bench, side_by_side
from attn_exp.doctor.run_checks import CHECKS, alarms_fire
from attn_exp.results.calibration import Calibration, calibration_path, margin_for, read_calibration, write_calibration
from attn_exp.worker.machine.device import Machine


@pytest.fixture
def bench():
    torch.set_num_threads(1)
    _, calls = attention("cpu", batch=1, length=64, heads=1, dim=16)
    return Bench(Machine.open("cpu"), calls.forward, 100.0)


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path))
    return tmp_path


def test_every_alarm_fires_on_a_cpu(bench):
    finding = alarms_fire(bench)
    assert finding.passed, finding.seen


def test_an_alarm_that_does_not_fire_is_named(bench, monkeypatch):
    monkeypatch.setattr(alarms, "telemetry_flags", lambda *_: set())
    finding = alarms_fire(bench)
    assert not finding.passed
    assert "silent: throttle, shared GPU" in finding.seen


def test_a_proof_that_raises_fails_alone_and_sets_the_exit_code(bench, state, monkeypatch, capsys):
    def breaks(_):
        """3: breaks."""
        raise RuntimeError("no such luck")

    def holds(_):
        """4: holds."""
        return Finding("holds", True, "well")

    monkeypatch.setattr(doctor, "open_bench", lambda device: bench)
    monkeypatch.setattr(doctor, "others_cores", lambda first, last: 1.5)
    monkeypatch.setitem(CHECKS, "cpu", (breaks, holds))
    assert doctor.run("cpu") == 1
    out = capsys.readouterr().out.splitlines()
    assert "need a GPU" in out[0]
    assert out[1].startswith("FAIL  3 breaks: RuntimeError: no such luck")
    assert out[2].startswith("pass  4 holds: well")
    assert out[3] == "other programs kept 1.5 processors busy: run the failed checks again on an idle machine"
    assert out[4] == "the margin is not stored, because not every check passed"
    assert not list(state.glob("calibration-*.json"))
    # Without a failed check there is none to run again.
    monkeypatch.setitem(CHECKS, "cpu", (holds,))
    doctor.run("cpu")
    assert "the margin may be smaller on an idle machine" in capsys.readouterr().out


def test_the_delta_of_noisy_a_a_comparisons_is_kept_and_found(bench, state, monkeypatch):
    monkeypatch.setitem(verdicts.COMPARISONS, "cpu", (6, 1, 1))
    verdicts.equal_things_are_equal(bench)
    assert bench.comparisons == 6
    assert bench.margin >= 0.01
    write_calibration(Calibration(device="cpu X", margin=0.07))
    assert read_calibration("cpu X") == Calibration(device="cpu X", margin=0.07)
    assert margin_for("cpu X") == 0.07
    assert margin_for("another") == 0.01
    calibration_path("cpu X").write_text("{")
    assert margin_for("cpu X") == 0.01


@pytest.fixture
def rounds(monkeypatch):
    """Stands in for seven rounds of two calls, without noise; a list of the medians that each call has in turn."""
    given = []
    monkeypatch.setattr(verdicts, "side_by_side", lambda *_, **__: [dict.fromkeys(range(7), us) for us in given])
    monkeypatch.setitem(verdicts.COMPARISONS, "cpu", (4, 4, 4))
    return given


def test_instances_that_differ_a_clock_that_sees_nothing_and_one_that_sees_too_much_fail(bench, rounds):
    rounds[:] = 100.0, 108.0
    assert not verdicts.equal_things_are_equal(bench).passed
    assert not verdicts.differences_are_found(bench).passed  # 0.3 % are called a difference, too
    rounds[:] = 100.0, 100.0
    assert verdicts.equal_things_are_equal(bench).passed
    assert not verdicts.differences_are_found(bench).passed
    assert not verdicts.twice_the_work_takes_twice_as_long(bench).passed


def test_calls_that_have_hardly_a_round_in_common_are_timed_again(bench, monkeypatch):
    apart, together = [{0: 100.0, 1: 100.0}, {1: 100.0, 2: 100.0}], [dict.fromkeys(range(7), 100.0)] * 2
    given = iter([apart, together] * 4)
    monkeypatch.setattr(verdicts, "side_by_side", lambda *_, **__: next(given))
    monkeypatch.setitem(verdicts.COMPARISONS, "cpu", (4, 1, 1))
    assert verdicts.equal_things_are_equal(bench).passed
    assert next(given, None) is None


@pytest.mark.parametrize(("stamped_mhz", "passes"), [((1965, 1980, 1965, 1980), True), ((1980,) * 4, False)])
def test_sleeps_are_linear_at_one_clock(bench, monkeypatch, stamped_mhz, passes):
    """For a while after load the clock is a step lower, and comes back between two sleeps."""
    bench.machine.gpu, bench.machine.environment["max_sm_clock_mhz"] = object(), 1980.0
    sleeps = zip((200_000, 400_000, 800_000, 1_600_000), (1965, 1980, 1965, 1980), stamped_mhz, strict=True)
    timings = [SimpleNamespace(times_us=(4.0 + count / mhz,), clocks_mhz=(seen,)) for count, mhz, seen in sleeps]
    monkeypatch.setattr(verdicts, "sample_turns", lambda *_, **__: timings)
    monkeypatch.setattr(verdicts, "make_timer", lambda *_: None)
    assert verdicts.sleep_is_linear(bench).passed == passes


@pytest.mark.parametrize(
    ("job_us", "job_mhz", "passes"), [(1602.0, 1732.0, True), (1602.0, 1707.0, False), (1560.0, 1779.0, False)]
)
def test_a_job_takes_as_long_as_a_loop_at_one_clock(bench, monkeypatch, job_us, job_mhz, passes):
    """A capped clock moves in steps of 15 MHz: a job may be a step above the loop, but no other 1 % from it."""
    cpu = verdicts.attention("cpu", batch=1, length=128)
    monkeypatch.setattr(verdicts, "attention", lambda *_, **__: cpu)
    monkeypatch.setattr(verdicts, "_loop", lambda *_: (1625.0, 1707.0))
    job = SimpleNamespace(status="ok", metrics={"forward/time_us": job_us, "forward/clock_mhz": job_mhz})
    monkeypatch.setattr(verdicts, "measure", lambda *_: job)
    assert verdicts.a_plain_loop_takes_as_long(bench).passed == passes


def test_every_check_of_a_cpu_comes_to_a_finding(bench, monkeypatch):
    """Also check 9, where the slower call is decided and leaves before the other."""
    monkeypatch.setitem(verdicts.COMPARISONS, "cpu", (2, 4, 1))
    seen = [check(bench).seen for check in CHECKS["cpu"]]
    assert "detected in" in seen[2]


def test_calls_are_timed_with_the_kernel_that_they_are_named_after(monkeypatch):
    monkeypatch.setattr(Machine, "ceilings_for", lambda *_: {})
    bench, seen = open_bench("cpu"), set()
    side_by_side(bench, lambda: seen.add(torch.backends.cuda.math_sdp_enabled()))
    assert seen == {False}


def test_the_doctor_speaks_at_once_and_all_along(tmp_path):
    """The checks' process writes its stages; the parent shows them on a terminal, the first before it has begun."""
    own, its = pty.openpty()
    terminal = environment() | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "attn_exp", "doctor", "device=cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, env=terminal, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    shown = b""
    try:
        while b"check 4" not in shown:
            shown += os.read(own, 1 << 16)
    finally:
        process.send_signal(signal.SIGINT)
        # Until nobody holds the terminal any more.
        with contextlib.suppress(OSError):
            while part := os.read(own, 1 << 16):
                shown += part
        os.close(own)
    assert process.wait(240) == 130
    assert b"starting" in shown
    assert b"\x1e" not in shown and b"Traceback" not in shown


@pytest.mark.parametrize("arguments", [("device=gpu",), ("cuda",), ("device=cuda:7",), ("device=cpu", "x=1")])
def test_mistakes_are_one_sentence(capsys, arguments):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "Traceback" not in err
