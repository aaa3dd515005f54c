import pytest
import torch
from cli import run

from attn_exp.doctor import clock_checks as verdicts
from attn_exp.doctor import run_checks as alarms
from attn_exp.doctor import run_checks as doctor
from attn_exp.doctor.bench import Bench, Finding, attention, side_by_side
from attn_exp.doctor.run_checks import CHECKS, alarms_fire
from attn_exp.results.calibration import Calibration, calibration_path, margin_for, read_calibration, write_calibration
from attn_exp.worker.device import Machine


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
    slowed = verdicts._slowed(bench, 20.0)
    one, two = side_by_side(bench, bench.call, slowed)
    assert min(two) > max(one)


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
