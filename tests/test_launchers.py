"""Launchers: one sweep from many tasks, here on GPUs that only sleep, in processes of submitit, and on a local Ray."""

import contextlib
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from cli import QUICK, TESTS, complaints, environment, finished, interrupt, left_behind, records, run, runs, wait_for
from filelock import FileLock
from inprocess import typed

from attn_exp.core.host import process as process_module
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.core.record.file import FILE_NAME
from attn_exp.core.record.record import Record
from attn_exp.execution.gpus import _lock_path
from attn_exp.results.read import read_folder

RIVALS = ("eager", "flash", "math")
SLEEPY = ("-m", f"backend={','.join(RIVALS)}", "batch=range(1,9)", "save_plots=false", "hydra/launcher=local_gpus")


def sleepy(*arguments: str, cwd: Path, gpus: int = 4) -> subprocess.Popen[str]:
    """The command line on a host of so many GPUs, on which every job sleeps."""
    variables = environment() | {"ATTN_EXP_TEST": str(cwd), "FAKE_GPUS": str(gpus)}
    # A busy machine takes long to make a store.
    patient = () if "tracker=none" in arguments else ("tracker.patience_s=300",)
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS / "sleepers"), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "attn_exp", *arguments, *patient]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, env=variables, text=True, start_new_session=True, **pipes)


def done(process: subprocess.Popen[str]) -> str:
    """What is printed in the end: the lines of the finished jobs, then the results."""
    out, err = process.communicate(timeout=280)
    ran = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    assert (ran.returncode, complaints(ran)) == (0, [])
    return "\n".join([*finished(ran), out])


def found(cwd: Path, sweep: str) -> list[Record]:
    read = read_folder(cwd / "multirun" / sweep, may_be_empty=True)
    assert not read.broken
    return list(read.records())


def by_gpu(found: Iterable[Record]) -> dict[str, list[Record]]:
    gpus = defaultdict(list)
    for record in found:
        gpus[str(record.request.gpu_uuid)].append(record)
    return gpus


def cases_by_gpu(found: Iterable[Record]) -> dict[str, set[object]]:
    return {gpu: {record.request.case for record in own} for gpu, own in by_gpu(found).items()}


def test_each_case_has_one_gpu_and_each_gpu_one_job_at_a_time(tmp_path):
    # A GPU on which another measures is waited for only while there is work for it.
    with FileLock(_lock_path(GpuInfo(3, "", "GPU-fake-3"))):
        out = done(sleepy(*SLEEPY, "tracker=none", "stopping.budget_s=0.2", "sweep=four", cwd=tmp_path))
    assert "waiting for GPU 3 (Sleeper), on which another attn_exp is measuring" in out
    four = found(tmp_path, "four")
    # The sleeper says `error` where two are on one GPU at once, or where its GPU is not leased.
    assert {record.status for record in four} == {"ok"}
    assert len(four) == 24
    # A worker gets the rivals of a case together.
    assert {record.environment["in_turns"] for record in four} == {len(RIVALS)}
    cases = cases_by_gpu(four)
    assert sorted(cases) == [f"GPU-fake-{index}" for index in range(3)]
    assert sum(len(own) for own in cases.values()) == 8
    assert [line[:7] for line in out.splitlines()[:24]] == [f"[{number:>2}/24]" for number in range(1, 25)]
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "multirun" / "four" / ".launch").exists()


def test_one_parent_run_one_table_and_a_resume_that_keeps_cases_on_their_gpus(tmp_path):
    words = (*SLEEPY, "batch=range(1,5)", "sweep=s")
    first = done(sleepy(*words, cwd=tmp_path, gpus=2))
    before = {record.request.job: record for record in found(tmp_path, "s")}
    kinds = sorted(tags["attn_exp.kind"] for _, _, tags in runs(tmp_path))
    assert kinds == ["job"] * 12 + ["sweep"]
    assert {status for _, status, _ in runs(tmp_path)} == {"FINISHED"}
    assert "fastest, or too close to it to call" in first and (tmp_path / "multirun" / "s" / "table.txt").exists()

    for job in [job for job in before if not job.startswith("math")]:
        shutil.rmtree(tmp_path / "multirun" / "s" / job)
    # That a resume leaves MLflow's runs as they are is shown without a launcher (test_isolation.py).
    again = done(sleepy(*words, "tracker=none", cwd=tmp_path, gpus=2))
    assert "4 of 12 jobs were done before and are kept" in again
    after = {record.request.job: record for record in found(tmp_path, "s")}
    assert cases_by_gpu(after.values()) == cases_by_gpu(before.values())
    assert {job for job in after if after[job].finished_at == before[job].finished_at} == {
        job for job in before if job.startswith("math")
    }


def test_whatever_ends_the_parent_ends_its_workers_and_the_same_command_goes_on(tmp_path):
    words = (*SLEEPY, "stopping.budget_s=0.5", "sweep=cut", "tracker=none")
    before = {}
    for number in (signal.SIGINT, signal.SIGKILL):
        process = sleepy(*words, cwd=tmp_path)
        last = len(before)
        wait_for(lambda last=last: len(list(tmp_path.glob(f"multirun/cut/*/{FILE_NAME}"))) > last)
        out, err = interrupt(process, number)
        assert "Traceback" not in err
        wait_for(lambda: left_behind(tmp_path) == [])
        if number != signal.SIGKILL:
            assert process.returncode == 130
            assert "sweep=cut" in out.splitlines()[-1]
        kept, before = before, {record.request.job: record.finished_at for record in found(tmp_path, "cut")}
        assert len(kept) < len(before) < 24 and kept.items() <= before.items()
        for path in tmp_path.glob("multirun/cut/busy-*"):
            path.unlink()
    done(sleepy(*words, cwd=tmp_path))
    after = {record.request.job: record.finished_at for record in found(tmp_path, "cut")}
    assert len(after) == 24 and before.items() <= after.items()


def test_stop_on_ends_all_tasks(tmp_path):
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "shot.yaml").write_text("_target_: fakes.Honest\nname: shot\nkill: SIGSEGV\n")
    arguments = ("-m", "backend=shot,eager", "batch=range(1,30)", "sweep=k", "tracker=none", "stop_on=[crashed]")
    process = sleepy("--config-dir", "conf", *arguments, "hydra/launcher=local_gpus", cwd=tmp_path)
    out, err = process.communicate(timeout=280)
    assert (process.returncode, complaints(subprocess.CompletedProcess([], 0, "", err))) == (1, [])
    assert out.count("stopped at the first crashed job (stop_on), shot-") == 1
    there = found(tmp_path, "k")
    assert len(there) < 30
    # Its case is whole; other tasks are ended in the middle of theirs.
    (stopped,) = [record for record in there if record.request.job in out.partition("(stop_on), ")[2]]
    assert len([one for one in there if one.request.case == stopped.request.case]) == 2
    assert left_behind(tmp_path) == []


# Tasks in other processes: of submitit's local executor, and of a Ray that the command starts.

ELSEWHERE = {
    "slurm": ("hydra/launcher=slurm", "hydra.launcher.cluster=local"),
    "ray": ("hydra/launcher=ray", "hydra.launcher.address=null"),
}
ON_CPU = ("-m", *QUICK, "backend=eager,flash", "batch=1,2", "stopping.budget_s=1", "sweep=x")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A Ray of this host that is not the command's; its address. Both know a token of this test's own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    script = (
        "import ray, sys; print(ray.init(num_cpus=2, include_dashboard=False).address_info['address'], flush=True); "
    )
    variables = environment() | {"RAY_USAGE_STATS_ENABLED": "0"}
    started = subprocess.Popen(
        [sys.executable, "-c", f"{script}sys.stdin.read()"],
        cwd=tmp_path,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with started:
        assert started.stdout is not None and started.stdin is not None
        yield started.stdout.readline().strip()
        started.stdin.close()


@pytest.mark.parametrize("launcher", ELSEWHERE)
def test_jobs_of_several_processes_end_in_one_sweep(tmp_path, launcher, request):
    # With workers that measure, and one that dies.
    arguments = ("-m", *QUICK, "backend=eager,cudnn,segfaults", "batch=1,2", "sweep=x")
    address = f"hydra.launcher.address={request.getfixturevalue('cluster')}" if launcher == "ray" else "seed=123"
    ran = run(*arguments, *ELSEWHERE[launcher], address, "hydra.launcher.tasks=2", cwd=tmp_path)
    assert (ran.returncode, complaints(ran)) == (0, [])
    there = records(tmp_path, "x")
    assert sorted(record.status for record in there.values()) == ["crashed"] * 2 + ["ok"] * 2 + ["unsupported"] * 2
    assert len(finished(ran)) == 6
    assert (tmp_path / "multirun" / "x" / "table.txt").read_text() in ran.stdout
    wait_for(lambda: left_behind(tmp_path) == [])


def tasks_of(cwd: Path) -> list[int]:
    """The processes that have a worker of ours, and are not the command itself."""
    found = []
    for process in left_behind(cwd):
        # Either may end meanwhile.
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
                # A worker's guard; below that is the worker.
                if str(process_module.__file__).encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(process)
    return found


@pytest.mark.parametrize("launcher", ELSEWHERE)
def test_a_killed_task_is_told_retriable_and_no_hang(tmp_path, launcher):
    process = sleepy(*ON_CPU, *ELSEWHERE[launcher], cwd=tmp_path)
    # That crashed jobs are tried again is shown without a launcher (test_isolation.py).
    wait_for(lambda: list(tmp_path.glob(f"multirun/x/*/{FILE_NAME}")))
    (task,) = tasks_of(tmp_path)
    os.kill(task, signal.SIGKILL)
    out = done(process)
    assert f"task 0 of {launcher} died: " in out
    there = found(tmp_path, "x")
    assert len(there) == 4
    crashed = [record for record in there if record.status == "crashed"]
    told = {str(record.reason).split(":")[0] for record in crashed}
    assert told == {"task 0 died", f"all tasks of {launcher} had ended"}
    assert f"{len(crashed)} jobs without a result; try again with: " in out
    wait_for(lambda: left_behind(tmp_path) == [])


def stored(cwd: Path) -> bool:
    """Whether the sweep's run is in the database, which is opened beside the first jobs."""
    try:
        return bool(runs(cwd))
    except sqlite3.OperationalError:
        return False


@pytest.mark.parametrize(("launcher", "number"), [("slurm", signal.SIGKILL), ("ray", signal.SIGINT)])
def test_no_task_outlives_its_parent(tmp_path, launcher, number):
    # The parent alone writes to MLflow, whatever the tasks are; killed, it says nothing there.
    tracked = number == signal.SIGINT
    words = (word.replace("budget_s=1", "budget_s=60") for word in ON_CPU)
    process = sleepy(*words, *ELSEWHERE[launcher], *(("tracker=mlflow",) if tracked else ()), cwd=tmp_path)
    wait_for(lambda: tasks_of(tmp_path) and (not tracked or stored(tmp_path)))
    out, err = interrupt(process, number)
    assert "Traceback" not in err
    wait_for(lambda: left_behind(tmp_path) == [])
    if tracked:
        assert process.returncode == 130
        assert "sweep=x" in out.splitlines()[-1]
        assert "RUNNING" not in {status for _, status, _ in runs(tmp_path)}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A host from which one submits to Slurm; the folder in which that keeps its jobs."""
    kept, programs = tmp_path / "slurm", tmp_path / "bin"
    kept.mkdir()
    programs.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel"):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {TESTS / "fake_slurm.py"} {name} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(kept))
    return kept


def test_tasks_go_through_sbatch_and_lease_what_they_get(tmp_path, slurm, monkeypatch):
    monkeypatch.setenv("FAKE_SLURM_NODES", "2")
    arguments = ("-m", "backend=eager,flash", "batch=1,2,4", "sweep=x", "tracker=none", "save_plots=false")
    options = ("hydra.launcher.tasks=3", "hydra.launcher.partition=gpu", "hydra.launcher.timeout_min=7")
    out = done(sleepy(*arguments, "hydra/launcher=slurm", *options, cwd=tmp_path, gpus=2))
    assert "3 tasks on slurm: 1234_0, 1234_1, 1234_2\n" in out and "died" not in out
    there = found(tmp_path, "x")
    assert [record.status for record in there] == ["ok"] * 6
    assert all(len({record.request.gpu_uuid for record in own}) == 1 for own in _by_case(there))
    asked = (slurm / "options").read_text()
    for option in ("'partition': 'gpu'", "'time': '7'", "'gpus-per-node': '1'", "'array': '0-2%"):
        assert option in asked, asked
    # A task that is still queued when all is done is cancelled and not waited for.
    wait_for(lambda: (slurm / "job-1234_2").read_text() == "cancelled")
    wait_for(lambda: left_behind(tmp_path) == [])


def test_a_refusal_by_slurm_is_told_in_its_words(tmp_path, slurm, monkeypatch):
    call = typed(monkeypatch, tmp_path)
    code, out, err = call(*ON_CPU, "hydra/launcher=slurm", "hydra.launcher.partition=nope")
    said = "Slurm does not take the tasks: sbatch: error: invalid partition specified: nope"
    assert (code, err) == (2, f"attn-exp: {said}\n")
    assert "no records" not in out and not found(tmp_path, "x")


def _by_case(found: list[Record]) -> list[list[Record]]:
    cases = defaultdict(list)
    for record in found:
        cases[record.request.case].append(record)
    return list(cases.values())


# What is typed wrong.

WRONG = {
    "hydra/launcher=joblib": "there is no NVIDIA GPU here for jobs side by side: leave hydra/launcher out",
    "hydra/launcher=local_gpus device=cpu": "takes all GPUs: leave device=cpu out",
    "hydra/launcher=local_gpus isolation=none": "leave hydra/launcher=local_gpus or isolation=none out",
    "hydra/launcher=slurm": "needs sbatch and srun: start from a host that submits to Slurm",
    "hydra/launcher=slurm hydra.launcher.partiton=gpu": "did you mean 'hydra.launcher.partition'?",
    "hydra/launcher=slurm hydra.launcher.tasks=0": "hydra.launcher.tasks=0 is not a whole number from 1",
    "hydra/launcher=slurm device=cuda:1": "with hydra/launcher=slurm leave device out",
    "hydra/launcher=slurm hydra.launcher.cluster=local device=cuda hydra.launcher.gpus_per_node=null": "needs an NV",
    "hydra/launcher=ray hydra.launcher.tasks=many": "hydra.launcher.tasks=many is not a whole number from 1",
    "+hydra.job.env_set.A=b device=cpu": "need hydra/sweeper=basic",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_stops_with_one_sentence_before_any_work(monkeypatch, tmp_path, line):
    call = typed(monkeypatch, tmp_path)
    code, out, err = call("-m", "batch=1,2", *line.split())
    assert (code, out) == (2, "")
    assert err.startswith("attn-exp: ") and err.count("\n") == 1
    assert WRONG[line] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("launcher", "engine"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_engine_that_is_not_installed_is_named(monkeypatch, tmp_path, launcher, engine):
    monkeypatch.setitem(sys.modules, engine, None)
    code, _, err = typed(monkeypatch, tmp_path)("-m", "batch=1,2", f"hydra/launcher={launcher}")
    assert (code, err.count("\n")) == (2, 1)
    assert f"hydra/launcher={launcher} needs {engine} (" in err and f"'attn_exp[{launcher}]'" in err


def test_a_launcher_without_m_is_no_job_of_this_process(monkeypatch, tmp_path):
    code, _, err = typed(monkeypatch, tmp_path)("device=cpu", "hydra/launcher=slurm")
    assert (code, err) == (2, "attn-exp: hydra/launcher=slurm needs -m (--multirun): python -m attn_exp -m ...\n")


def test_a_cluster_s_device_is_the_one_that_its_tasks_ask_for(monkeypatch, tmp_path):
    call = typed(monkeypatch, tmp_path)
    local = ("-m", "batch=1,2", "dry_run=true", "hydra/launcher=slurm", "hydra.launcher.cluster=local")
    assert " on cuda by timer device" in call(*local)[1]
    assert " on cpu by timer cpu" in call(*local, "hydra.launcher.gpus_per_node=null")[1]
    assert " on cuda by " in call(*local, "hydra.launcher.gpus_per_node=null", "hydra.launcher.gres='gpu:h200:1'")[1]
    assert " on cpu by " in call(*local, "device=cpu")[1]
    assert TESTS.exists() and list(tmp_path.iterdir()) == []
