"""A worker process that ends at the wrong moment, or says what no worker says: whose job is charged with it."""

import json
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import cli
import pytest

from attn_exp.core.files import cut_middle
from attn_exp.execution import worker_process
from attn_exp.execution.worker import Outcome, Worker


@pytest.fixture(autouse=True)
def quitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "WORKER", "quitter")
    monkeypatch.setenv("PYTHONPATH", cli.environment()["PYTHONPATH"])


def outcomes(place: Path, *thens: str) -> list[Outcome]:
    """Return the outcome of a job for each of `thens`, all queued at once."""
    worker = Worker(reuse=True, timeout_s=30)
    folders = []
    for number, then in enumerate(thens):
        folder = place / f"job\n{number}"
        folder.mkdir()
        (folder / "then").write_text(then)
        folders.append(folder)
        worker.submit(folder)
    try:
        ended = [worker.wait() for _ in folders]
    finally:
        worker.close()
    assert [one.folder for one in ended] == folders
    return ended


def test_a_worker_that_dies_between_two_jobs_charges_neither(tmp_path: Path) -> None:
    assert [one.status for one in outcomes(tmp_path, "exit", "", "exit", "exit", "")] == [None] * 5
    done_by = [(tmp_path / f"job\n{number}" / "by").read_text() for number in range(5)]
    assert done_by[0] != done_by[1] == done_by[2] != done_by[3] != done_by[4]


def test_a_worker_that_dies_in_a_job_charges_that_one_also_behind_such_an_end(tmp_path: Path) -> None:
    first, second, third = outcomes(tmp_path, "exit", "die", "")
    assert (first.status, second.status, third.status) == (None, "crashed", None)
    assert second.reason is not None
    assert "exited with code 3" in second.reason


def together(place: Path, *thens: str) -> tuple[list[Outcome], list[tuple[str, Path | None]]]:
    """The outcomes of jobs that are measured in turns, by name `j0`, `j1`, and the stages that were said."""
    worker, stages = Worker(reuse=True, timeout_s=30), list[tuple[str, Path | None]]()
    folders = [place / f"j{number}" for number in range(len(thens))]
    for folder, then in zip(folders, thens, strict=True):
        folder.mkdir()
        (folder / "then").write_text(then)
    worker.submit(*folders)
    try:
        ended = [worker.wait(lambda stage, folder: stages.append((stage, folder))) for _ in folders]
    finally:
        worker.close()
    assert [one.folder for one in ended] == folders
    return ended, stages


def run_of(place: Path, name: str) -> tuple[list[str], bool]:
    """The jobs with which a job was measured in the end, and whether apart from others."""
    run = json.loads((place / name / "run").read_text())
    return [Path(folder).name for folder in run["folders"]], run["apart"]


def test_the_stages_of_a_job_are_handed_on_with_its_folder(tmp_path: Path) -> None:
    ended, stages = together(tmp_path, "", "stages")
    assert [one.status for one in ended] == [None, None]
    assert stages == [(stage, tmp_path / "j1") for stage in ("check", "compile", "time")]


def test_jobs_at_work_when_the_worker_died_are_tried_alone_and_the_others_together(tmp_path: Path) -> None:
    ended, _ = together(tmp_path, "", "die in check", "")
    assert [one.status for one in ended] == [None, "crashed", None]
    assert run_of(tmp_path, "j0") == run_of(tmp_path, "j2") == (["j0", "j2"], False)


def test_a_worker_that_dies_while_all_are_timed_tries_each_alone(tmp_path: Path) -> None:
    ended, stages = together(tmp_path, "", "die", "")
    assert [one.status for one in ended] == [None, "crashed", None]
    assert stages[0] == ("time", None)
    assert [run_of(tmp_path, name) for name in ("j0", "j2")] == [(["j0"], True), (["j2"], True)]


def test_a_profiler_that_kills_the_worker_costs_the_other_jobs_nothing(tmp_path: Path) -> None:
    ended, _ = together(tmp_path, "die in profile", "", "")
    assert [(one.status, one.profiling) for one in ended] == [("crashed", True), (None, False), (None, False)]
    assert run_of(tmp_path, "j1") == (["j1", "j2"], False)


@pytest.mark.parametrize("then", [("daemon",), ("daemon", "exit")])
def test_a_process_that_left_the_worker_s_group_ends_with_it(tmp_path: Path, then: tuple[str, ...]) -> None:
    outcomes(tmp_path, *then)
    cli.wait_for(lambda: not alive(daemon_of(tmp_path)))


def daemon_of(place: Path) -> int:
    return int((place / "job\n0" / "daemon").read_text())


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_a_daemon_without_our_environment_ends_with_a_worker_that_dies_in_that_job(tmp_path: Path, number: int) -> None:
    first, second = outcomes(tmp_path, f"escaped, then killed by {number:d}", "")
    # The guard between the two ends as the worker does.
    assert first.status == "crashed" and signal.Signals(number).name in str(first.reason)
    assert second.status is None
    cli.wait_for(lambda: not alive(daemon_of(tmp_path)))


def test_a_daemon_without_our_environment_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "job\n0"
    folder.mkdir()
    (folder / "then").write_text("escaped")
    code = """
        import os, sys
        from pathlib import Path
        from attn_exp.execution import worker, worker_process
        worker_process.WORKER = "quitter"
        one = worker.Worker(reuse=True, timeout_s=30)
        one.submit(Path(sys.argv[1]))
        one.wait()
        os.kill(os.getpid(), 9)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    for left in (daemon_of(tmp_path), int((folder / "by").read_text())):
        cli.wait_for(lambda left=left: not alive(left), 10.0)


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    outcomes(tmp_path, "chatter")
    log = (tmp_path / "job\n0" / "worker.log").read_bytes()
    assert (16 << 20) < len(log) < (16 << 20) + 100
    assert log.startswith(b"first\n") and log.endswith(b"\nlast")
    assert b"\n... 25165835 bytes were left out here ...\n" in log


def test_a_long_log_is_cut_on_a_full_disk_too(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with log.open("wb") as file:
        file.truncate(100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
        cut_middle(log, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert log.stat().st_size == 600 and b"99000 bytes were left out here" in log.read_bytes()
