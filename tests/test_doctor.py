import itertools
import re
import signal

import pytest
import torch
from cli import run, start
from fakes import FakeGpu

from attn_exp.doctor import clock_checks as verdicts
from attn_exp.doctor import run_checks as alarms
from attn_exp.doctor import run_checks as doctor
from attn_exp.doctor.bench import Bench, Finding, attention, side_by_side
from attn_exp.doctor.run_checks import CHECKS, alarms_fire
from attn_exp.results.calibration import Calibration, calibration_path, margin_for, read_calibration, write_calibration
from attn_exp.timers.gpu import SLEEP_CYCLES_PER_US
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


def test_the_delta_of_noisy_a_a_comparisons_is_kept_and_found(bench, state, monkeypatch):
    monkeypatch.setitem(verdicts.COMPARISONS, "cpu", (6, 1, 1))
    verdicts.equal_things_are_equal(bench)
    assert bench.comparisons == 6
    assert bench.margin >= 0.01
    write_calibration(Calibration(device="cpu X", margin=0.07))
    assert read_calibration("cpu X") == Calibration(device="cpu X", margin=0.07)
    assert margin_for("cpu X") == 0.07
    calibration_path("cpu earlier").write_text('{"device": "cpu earlier", "delta": 0.05}')
    assert margin_for("cpu earlier") == 0.05, "as earlier versions wrote it"
    assert margin_for("another") == 0.01
    calibration_path("cpu X").write_text("{")
    assert margin_for("cpu X") == 0.01


def test_a_slowed_call_is_slower_by_what_was_asked(bench):
    one, two = side_by_side(bench, *verdicts._slowed(bench, 20.0))
    assert min(two) > max(one)


def test_what_is_injected_on_a_gpu_is_not_the_launch_of_a_second_kernel(bench, monkeypatch):
    """A launch that takes 1.2 % of the call, as on an H200: both calls have it, and 0.3 % are what is between them."""
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    bench.machine.gpu, bench.call_us = FakeGpu(), 1000.0
    base, slowed = verdicts._slowed(bench, 0.003)
    base(), slowed()
    assert slept[1] - slept[0] == pytest.approx(3.0 * SLEEP_CYCLES_PER_US, abs=1)


# (device, kernel, graph, limit) in us: as H200s had them, and broken.
@pytest.mark.parametrize(
    ("times", "sound"),
    [
        ((37.0, 31.7, 36.0, 3.1), True),
        ((3000.0, 2996.0, 2990.0, 30.0), True),
        ((37.0, 31.7, 45.0, 3.1), False),
        ((100.0, 200.0, 100.0, 5.0), False),  # half of the work on a stream that events do not see
        ((37.0, 20.0, 37.0, 3.1), False),  # kernels that the profiler lost
        ((60.0, 31.7, 60.0, 3.8), False),  # the host's time between events
    ],
)
def test_timers_agree_where_they_do_and_not_where_a_setup_is_broken(times, sound):
    assert verdicts.agree(*times) is sound


@pytest.fixture
def rounds(monkeypatch):
    """Stands in for seven rounds of two calls, without noise; a list of the medians that each call has in turn."""
    given = []
    monkeypatch.setattr(verdicts, "side_by_side", lambda *_, **__: [[us] * 7 for us in given])
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


def test_a_check_says_how_far_it_is(bench, rounds):
    rounds[:], shares = (100.0, 100.0), []
    bench.progress = shares.append
    verdicts.equal_things_are_equal(bench)
    assert shares == [0.0, 0.25, 0.5, 0.75]


def test_the_doctor_speaks_at_once_and_all_along(tmp_path, monkeypatch):
    """The checks' process writes its stages; the parent shows them on standard error, the first before it has begun."""
    process = start("doctor", "device=cpu", cwd=tmp_path)
    stages = itertools.groupby(iter(process.stderr.readline, ""), key=lambda line: re.split(r", \d+ s|:", line)[0])
    try:
        # Each stage has a line a second: more of them on a busy machine.
        assert next(stages)[0] == "starting"
        # A stage that takes less than a second has no line.
        said = next(stages)[0]
        said = next(stages)[0] if said.startswith("opening the device") else said
        assert said.startswith("check ")
    finally:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "\x1e" not in out and "Traceback" not in out


def test_proofs_are_numbered_as_documented():
    numbers = {device: [int(check.__doc__.split(":")[0]) for check in found] for device, found in CHECKS.items()}
    assert numbers == {"cuda": list(range(1, 11)), "cpu": [4, 8, 9, 10]}


@pytest.mark.parametrize("arguments", [("device=gpu",), ("cuda",), ("device=cuda:7",), ("device=cpu", "x=1")])
def test_mistakes_are_one_sentence(tmp_path, arguments):
    done = run("doctor", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_help_says_what_it_does(tmp_path):
    done = run("doctor", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "ten checks on a GPU" in " ".join(done.stdout.split())
