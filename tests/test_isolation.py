import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli import QUICK, TRACKED, interrupt, left_behind, records, run, runs, start, wait_for
from inprocess import typed

from attn_exp.core.host.process import descendants, kill_all
from attn_exp.core.record.file import FILE_NAME

BAD = {
    "segfaults": ("crashed", "SIGSEGV"),
    "raises": ("error", "this backend raises"),
    "exits": ("crashed", "exited with code 3"),
    "ignoressigterm": ("timeout", "longer than 8 s"),
    "exhaustsmemory": ("out_of_memory", ""),
    "onenan": ("inaccurate", "not finite"),
    "cudnn": ("unsupported", "NVIDIA GPUs"),
}


def test_a_sweep_of_bad_backends_beside_good_ones_loses_nothing(tmp_path):
    mixed = [name for bad in BAD for name in (bad, "eager", "flash")]
    choice = ",".join(dict.fromkeys(mixed))
    arguments = ("-m", f"backend={choice}", "sweep=bad", "isolation.timeout_s=8", *TRACKED)
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path, "bad")
    assert len(found) == len(BAD) + 2
    for name, (status, words) in BAD.items():
        record = found[name]
        assert record.status == status, record.reason
        assert words in (record.reason or "")
        assert record.metrics == {}
    for name in ("eager", "flash"):
        assert found[name].status == "ok"
        assert found[name].metrics["forward/time_us"] > 0
    assert left_behind(tmp_path) == []

    stored = runs(tmp_path)
    assert len(stored) == 1 + len(found)
    assert {status for _, status, _ in stored} == {"FINISHED", "FAILED"}
    tagged = {tags["attn_exp.job"]: tags["attn_exp.status"] for _, _, tags in stored if "attn_exp.job" in tags}
    assert tagged == {record.request.job: record.status for record in found.values()}

    # Of those that are worth a retry one that is quick, and one that takes its worker along: each costs seconds.
    retried = ["raises", "exits"]
    kept = ["eager", "flash", "onenan", "cudnn"]
    before = {record.request.job: record.finished_at for record in found.values()}
    choice = ",".join(retried + kept)
    again = run("-m", f"backend={choice}", "sweep=bad", "isolation.timeout_s=8", *TRACKED, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    later = records(tmp_path, "bad")
    measured = {name for name, record in later.items() if record.finished_at != before[record.request.job]}
    assert sorted(measured) == sorted(retried)
    assert later.keys() == found.keys()
    assert len(runs(tmp_path)) == len(stored)


def test_an_interrupt_ends_a_sweep_and_the_same_command_goes_on(tmp_path):
    """By Ctrl-C, killed together with its worker by SIGKILL, and then to its end."""
    # A slow case is left whenever one is waited for.
    arguments = ("-m", "backend=eager,slow", "batch=1,2,3", "sweep=cut", *TRACKED[:1], *TRACKED[2:])
    before = {}
    for number, count in ((signal.SIGINT, 1), (signal.SIGKILL, 2)):
        process = start(*arguments, cwd=tmp_path)
        wait_for(lambda count=count: len(list(tmp_path.glob(f"multirun/cut/slow-*/{FILE_NAME}"))) >= count)
        out, err = interrupt(process, number)
        assert "Traceback" not in err
        if number == signal.SIGKILL:
            assert process.returncode == -number
            wait_for(lambda: not left_behind(tmp_path))
        else:
            assert process.returncode == 130
            assert "sweep=cut" in out.splitlines()[-1]
            assert left_behind(tmp_path) == []
            assert "RUNNING" not in {status for _, status, _ in runs(tmp_path)}
        kept, before = before, _times(records(tmp_path, "cut"))
        assert len(before) < 6
        assert {job: found_at for job, found_at in before.items() if job in kept} == kept

    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path, "cut")
    assert len(found) == 6
    assert {record.status for record in found.values()} == {"ok"}
    assert {job: found_at for job, found_at in _times(found).items() if job in before} == before
    assert sorted(tags.get("attn_exp.status", "sweep") for _, _, tags in runs(tmp_path)) == ["ok"] * 6 + ["sweep"]
    assert {status for _, status, _ in runs(tmp_path)} == {"FINISHED"}


def test_an_end_before_the_first_job_leaves_nothing(tmp_path):
    process = start("sweep=early", *TRACKED, cwd=tmp_path)
    wait_for(lambda: (tmp_path / "multirun" / "early").exists())
    _, err = interrupt(process, signal.SIGTERM)
    assert process.returncode == 130 and "Traceback" not in err
    assert left_behind(tmp_path) == []


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A sweep of two jobs, and the command that measured it."""
    folder = tmp_path_factory.mktemp("two")
    done = run("-m", "backend=eager,printer", "sweep=two", *QUICK, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_output_of_a_backend_is_in_its_log_and_not_on_the_terminal(two):
    folder, done = two
    log = next(folder.glob("multirun/two/printer-*/worker.log")).read_text()
    assert "printed by the backend" in log
    assert "written by native code" in log
    assert "printed by" not in done.stdout + done.stderr


def test_a_job_can_be_run_again_by_hand(two):
    home, _ = two
    folder = next(home.glob("multirun/two/eager-*"))
    (folder / FILE_NAME).unlink()
    done = run("worker", str(folder), cwd=home)
    # Kineto, which traced the call, wrote nothing.
    assert done.returncode == 0 and "profiler_st" not in done.stderr
    assert records(home, "two")["eager"].status == "ok"


def test_a_record_that_cannot_be_read_is_named_kept_and_measured_again(two, monkeypatch):
    home, _ = two
    monkeypatch.setattr("attn_exp.worker.__main__.limit_memory", lambda: None)
    path = next(home.glob(f"multirun/two/eager-*/{FILE_NAME}"))
    newer = json.dumps(json.loads(path.read_bytes()) | {"schema": 99})
    path.write_text(newer)
    path.with_name("record.aside.json").write_text("of another day")
    code, out, _ = typed(monkeypatch, home)("backend=eager", "sweep=two", *QUICK, "isolation=none")
    assert code == 0 and "has schema 99" in out
    assert path.with_name("record.aside.json").read_text() == "of another day"
    assert path.with_name("record.aside-2.json").read_text() == newer
    assert records(home, "two")["eager"].status == "ok"


def test_a_killed_process_has_given_its_memory_back():
    program = "held = b'x' * (200 << 20); print(flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        kill_all({one for one in descendants(os.getpid()) if one[0] == child.pid})
        assert Path(f"/proc/{child.pid}/statm").read_text().split()[0] == "0"


def _times(found):
    return {record.request.job: record.finished_at for record in found.values()}
