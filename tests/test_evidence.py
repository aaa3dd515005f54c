"""bench/evidence.sh: that its steps run, name what failed, and measure what can be measured."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli import complaints
from inprocess import typed

from attn_exp.cli import COMMANDS

SCRIPT = Path(__file__).resolve().parent.parent / "bench" / "evidence.sh"
STEPS = re.findall(r"^step_(\w+)\(\)", SCRIPT.read_text(), re.MULTILINE)
# Takes python's place: keeps its arguments, a line a call, and fails where it is told to.
STUB = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(3 if os.environ.get("FAIL", "-") in sys.argv else 0)
"""


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(stub.parent), prepend=os.pathsep)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return lambda *words: subprocess.run(["bash", str(SCRIPT), *words], cwd=tmp_path, capture_output=True, text=True)


@pytest.mark.parametrize("words", [[], ["out"], ["--help"], ["out", "suite", "nope"]], ids=str)
def test_what_it_is_not_asked_rightly_it_answers_with_its_steps(evidence, words):
    done = evidence(*words)
    assert done.returncode == 2
    assert "usage: bench/evidence.sh OUT_FOLDER STEP...; the steps: suite doctor" in done.stderr


def test_a_step_that_fails_is_named_and_the_others_run(evidence, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIL", "doctor")
    done = evidence("out", "doctor", "profilers")
    assert done.returncode == 1
    said = (tmp_path / "out" / "steps.txt").read_text().splitlines()
    assert [line.rsplit(",", 1)[0] for line in said] == ["doctor: exit 3", "profilers: exit 0"]


@pytest.mark.parametrize("step", STEPS)
def test_no_step_hides_that_it_failed(evidence, tmp_path, monkeypatch, step):
    failing = {"suite": "pytest", "doctor": "doctor"}
    named = {"accuracy_fa4": "accuracy.py", "sdpa_sweep_quick": "sdpa_sweep.py"}.get(step, f"{step}.py")
    monkeypatch.setenv("FAIL", failing.get(step, str(SCRIPT.parent / named)))
    if not (SCRIPT.parent / named).exists() and step not in failing:
        monkeypatch.setenv("FAIL", "attn_exp")
    assert evidence("out", step).returncode == 1
    assert (tmp_path / "out" / "steps.txt").read_text().startswith(f"{step}: exit 3, ")


def test_every_sweep_of_it_composes(evidence, tmp_path, monkeypatch):

    evidence("out", *STEPS)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    sweeps = [words[2:] for words in calls if words[:2] == ["-m", "attn_exp"] and words[2] not in COMMANDS]
    files = [Path(words[0]) for words in calls if words[0] != "-m"]
    assert len(sweeps) >= 7 and len(files) >= 5 and all(path.is_file() for path in files)
    call = typed(monkeypatch, tmp_path)
    for words in sweeps:
        code, out, err = call(*words, "dry_run=true", "device=cpu")
        # Where other programs run, it says that it still checks.
        said = complaints(subprocess.CompletedProcess(words, code, out, err))
        assert (code, said) == (0, []), words
        assert "would run" in out and "impossible" not in out.splitlines()[0], out


def test_accuracy_that_was_not_checked_is_a_failure_and_named(tmp_path):
    command = [sys.executable, str(SCRIPT.with_name("accuracy.py")), str(tmp_path), "--cases", "2", "--processes", "1"]
    done = subprocess.run([*command, "--budget-s", "0.1", "eager"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = list(csv.DictReader((tmp_path / "accuracy.csv").read_text().splitlines()))
    assert [(row["backend"], row["status"], row["reason"]) for row in rows] == [
        ("eager", "not_done", "the time was over")
    ] * 2
