"""A version of torch that was not tested is told in one line and refused nowhere."""

import io
import os
import re
import subprocess
from pathlib import Path

import cli
import pytest
from cli import QUICK, records, run

from attn_exp.commands.doctor import main as doctor
from attn_exp.core.versions import untested_note

LINE = "torch 2.15.0 is not a tested version (tested: 2.11, 2.13)"

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def newer_torch(tmp_path, monkeypatch):
    """A folder on the path in which torch's metadata says 2.15.0; the torch that is imported stays the same."""
    folder = tmp_path / "torch-2.15.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.15.0\n")
    monkeypatch.syspath_prepend(folder.parent)
    variables = cli.environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    monkeypatch.setattr(cli, "environment", lambda: variables)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.1"])
def test_a_tested_release_needs_no_note(version):
    assert untested_note(version) is None


@pytest.mark.parametrize("version", ["2.14.0a0+git1234", "2.1.1", "2.110.0"])
def test_any_other_release_is_noted_in_one_line(version):
    note = untested_note(version)
    assert note.startswith(f"torch {version} is not a tested version") and "\n" not in note and len(note) <= 120


def test_the_pinned_torch_is_a_tested_one():
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert untested_note(pinned) is None


def test_a_sweep_says_it_once_and_measures(newer_torch, tmp_path):
    done = run("-m", "backend=math,eager", "sweep=s", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(LINE) == 1
    assert [record.status for record in records(tmp_path, "s").values()] == ["ok", "ok"]


def test_the_doctor_says_it(newer_torch, monkeypatch, capsys):
    class Passes:
        def __init__(self, *_, **__):
            self.stdout = io.StringIO()
            self.wait = self.kill = lambda: 0

    monkeypatch.setattr(subprocess, "Popen", Passes)
    assert doctor(["device=cpu"]) == 0
    assert capsys.readouterr().out == f"{LINE}\n"
