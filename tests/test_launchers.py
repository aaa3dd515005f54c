"""Launchers: one sweep from many tasks, here on GPUs that only sleep, in processes of submitit, and on a local Ray."""

import os
import resource
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
from cli import (
    QUICK,
    TESTS,
    TRACKED,
    complaints,
    environment,
    finished,
    interrupt,
    left_behind,
    records,
    run,
    runs,
    wait_for,
)
from filelock import FileLock
from inprocess import typed

from attn_exp.core import process as process_module
from attn_exp.core.errors import UserError
from attn_exp.core.nvml import GpuInfo
from attn_exp.core.record import Record
from attn_exp.core.record_file import FILE_NAME
from attn_exp.results.read import read_folder
from attn_exp.run.gpus import _lock_path
from attn_exp.sweep.launcher import load_engine
from attn_exp.sweep.slurm import _last_line

RIVALS = ("eager", "flash", "math")
SLEEPY = ("-m", f"backend={','.join(RIVALS)}", "batch=range(1,9)", "save_plots=false", "hydra/launcher=local_gpus")


def sleepy(*arguments: str, cwd: Path, gpus: int = 4) -> subprocess.Popen[str]:
    """The command line on a host of so many GPUs, on which every job sleeps."""
    variables = environment() | {"ATTN_EXP_TEST": str(cwd), "FAKE_GPUS": str(gpus)}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS / "sleepers"), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "attn_exp", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, env=variables, text=True, start_new_session=True, **pipes)


def done(process: subprocess.Popen[str]) -> str:
    """What is printed in the end: the lines of the finished jobs, then the results."""
    out, err = process.communicate(timeout=100)
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


def wall_s(found: list[Record]) -> float:
    """From a GPU's first job to the sweep's end, the mean over GPUs: start-up apart, idling at the end included."""
    end = max(record.finished_at for record in found)
    starts = [min(record.started_at for record in own) for own in by_gpu(found).values()]
    return sum(end - start for start in starts) / len(starts)


def times_as_fast(found: list[Record]) -> float:
    """Jobs' own times over the sweep's: on one GPU a job follows the other, which takes at least the former."""
    return sum(record.finished_at - record.started_at for record in found) / wall_s(found)


def test_four_gpus_are_four_times_as_fast_and_rivals_of_one_case_share_one(tmp_path):
    arguments = (*SLEEPY, "tracker=none")
    out = done(sleepy(*arguments, "stopping.budget_s=0.2", "sweep=four", cwd=tmp_path))
    four = found(tmp_path, "four")
    # The sleeper says `error` where two are on one GPU at once, or where its GPU is not leased.
    assert {record.status for record in four} == {"ok"}
    assert len(four) == 24
    cases = cases_by_gpu(four)
    assert sorted(cases) == [f"GPU-fake-{index}" for index in range(4)]
    assert sum(len(own) for own in cases.values()) == 8
    assert [line[:7] for line in out.splitlines()[:24]] == [f"[{number:>2}/24]" for number in range(1, 25)]
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "multirun" / "four" / ".launch").exists()
    # Another program may have kept the host busy.
    for budget_s in (0.5, 1.5):
        if times_as_fast(four) >= 0.9 * 4:
            break
        done(sleepy(*arguments, f"stopping.budget_s={budget_s}", f"sweep=for_{budget_s}", cwd=tmp_path))
        four = found(tmp_path, f"for_{budget_s}")
    assert times_as_fast(four) >= 0.9 * 4


def test_one_parent_run_one_table_and_a_resume_that_keeps_cases_on_their_gpus(tmp_path):
    first = done(sleepy(*SLEEPY, "sweep=s", cwd=tmp_path))
    before = {record.request.job: record for record in found(tmp_path, "s")}
    kinds = sorted(tags["attn_exp.kind"] for _, _, tags in runs(tmp_path))
    assert kinds == ["job"] * 24 + ["sweep"]
    assert {status for _, status, _ in runs(tmp_path)} == {"FINISHED"}
    assert (tmp_path / "multirun" / "s" / "table.txt").read_text() in first

    for job in [job for job in before if not job.startswith("math")]:
        shutil.rmtree(tmp_path / "multirun" / "s" / job)
    assert "8 of 24 jobs were done before and are kept" in done(sleepy(*SLEEPY, "sweep=s", cwd=tmp_path))
    after = {record.request.job: record for record in found(tmp_path, "s")}
    assert cases_by_gpu(after.values()) == cases_by_gpu(before.values())
    assert {job for job in after if after[job].finished_at == before[job].finished_at} == {
        job for job in before if job.startswith("math")
    }
    assert len(runs(tmp_path)) == 25


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_parent_ends_its_workers_and_the_same_command_goes_on(tmp_path, number):
    arguments = (*SLEEPY, "stopping.budget_s=0.3", "sweep=cut", "tracker=none")
    process = sleepy(*arguments, cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob(f"multirun/cut/*/{FILE_NAME}"))) >= 3)
    seconds, out, err = interrupt(process, number)
    assert seconds < 2
    assert "Traceback" not in err
    wait_for(lambda: left_behind(tmp_path) == [])
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "sweep=cut" in out.splitlines()[-1]
    before = {record.request.job: record.finished_at for record in found(tmp_path, "cut")}
    assert 3 <= len(before) < 24
    for path in tmp_path.glob("multirun/cut/busy-*"):
        path.unlink()
    done(sleepy(*SLEEPY[:3], "save_plots=false", "hydra/launcher=local_gpus", *arguments[len(SLEEPY) :], cwd=tmp_path))
    after = {record.request.job: record.finished_at for record in found(tmp_path, "cut")}
    assert len(after) == 24
    assert {job: at for job, at in after.items() if job in before} == before


def test_a_worker_that_is_killed_is_one_crashed_record(tmp_path):
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "shot.yaml").write_text("_target_: fakes.Honest\nname: shot\nkill: SIGKILL\n")
    arguments = ("-m", "backend=eager,shot,flash", "batch=1,2", "sweep=k", "tracker=none", "save_plots=false")
    out = done(sleepy("--config-dir", "conf", *arguments, "hydra/launcher=local_gpus", cwd=tmp_path, gpus=2))
    statuses = sorted((record.request.backend["name"], record.status) for record in found(tmp_path, "k"))
    assert statuses == [("eager", "ok")] * 2 + [("flash", "ok")] * 2 + [("shot", "crashed")] * 2
    assert "2 jobs without a result; try again with: " in out
    assert all(len(own) == 1 for own in cases_by_gpu(found(tmp_path, "k")).values())


def test_a_gpu_that_another_measures_on_is_waited_for_only_while_there_is_work_for_it(tmp_path):
    taken = FileLock(_lock_path(GpuInfo(1, "", "GPU-fake-1")))
    with taken:
        out = done(sleepy(*SLEEPY, "sweep=w", "tracker=none", cwd=tmp_path, gpus=2))
    assert "waiting for GPU 1 (Sleeper), on which another attn_exp is measuring" in out
    assert set(by_gpu(found(tmp_path, "w"))) == {"GPU-fake-0"}


def test_a_full_disk_ends_all_tasks_with_one_sentence(tmp_path):
    process = sleepy(*SLEEPY, "stopping.budget_s=0.3", "sweep=d", "tracker=none", cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob(f"multirun/d/*/{FILE_NAME}"))) >= 3)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    (sentence,) = complaints(subprocess.CompletedProcess(process.args, 2, out, err))
    assert sentence.startswith(f"attn-exp: cannot write to {tmp_path}/multirun/d (File too large): make room there")
    assert left_behind(tmp_path) == []
    for path in tmp_path.glob("multirun/d/busy-*"):
        path.unlink()
    done(sleepy(*SLEEPY, "stopping.budget_s=0.3", "sweep=d", "tracker=none", cwd=tmp_path))
    assert {record.status for record in found(tmp_path, "d")} == {"ok"}


def test_rivals_that_are_one_job_are_counted_once(tmp_path):
    out = done(sleepy(*SLEEPY[:2], "batch=1,1,2", *SLEEPY[3:], "sweep=o", "tracker=none", cwd=tmp_path, gpus=2))
    assert "[6/6]" in out
    assert len(found(tmp_path, "o")) == 6


def test_stop_on_ends_all_tasks(tmp_path):
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "shot.yaml").write_text("_target_: fakes.Honest\nname: shot\nkill: SIGSEGV\n")
    arguments = ("-m", "backend=shot,eager", "batch=range(1,30)", "sweep=k", "tracker=none", "stop_on=[crashed]")
    process = sleepy("--config-dir", "conf", *arguments, "hydra/launcher=local_gpus", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, complaints(subprocess.CompletedProcess([], 0, "", err))) == (1, [])
    assert out.count("stopped at the first crashed job (stop_on), shot-") == 1
    assert len(found(tmp_path, "k")) < 30
    assert left_behind(tmp_path) == []


def test_stop_on_counts_for_the_last_job_of_one_gpu_too(tmp_path):
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "shot.yaml").write_text("_target_: fakes.Honest\nname: shot\nkill: SIGSEGV\n")
    arguments = ("--config-dir", "conf", "-m", "backend=eager,shot", "batch=1", "sweep=k", "tracker=none")
    process = sleepy(*arguments, "stop_on=[crashed]", "save_plots=false", cwd=tmp_path, gpus=1)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, complaints(subprocess.CompletedProcess([], 0, "", err))) == (1, [])
    assert "stopped at the first crashed job (stop_on), shot-" in out
    assert len(found(tmp_path, "k")) == 2


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
    arguments = ("-m", *TRACKED, "backend=eager,cudnn,segfaults", "batch=1,2", "sweep=x")
    address = f"hydra.launcher.address={request.getfixturevalue('cluster')}" if launcher == "ray" else "seed=123"
    ran = run(*arguments, *ELSEWHERE[launcher], address, "hydra.launcher.tasks=2", cwd=tmp_path)
    assert (ran.returncode, complaints(ran)) == (0, [])
    there = records(tmp_path, "x")
    assert sorted(record.status for record in there.values()) == ["crashed"] * 2 + ["ok"] * 2 + ["unsupported"] * 2
    kinds = sorted(tags["attn_exp.kind"] for _, _, tags in runs(tmp_path))
    assert kinds == ["job"] * 6 + ["sweep"]
    assert "RUNNING" not in {status for _, status, _ in runs(tmp_path)}
    assert len(finished(ran)) == 6
    assert (tmp_path / "multirun" / "x" / "table.txt").read_text() in ran.stdout
    wait_for(lambda: left_behind(tmp_path) == [], 10)


def tasks_of(cwd: Path) -> list[int]:
    """The processes that have a worker of ours, and are not the command itself."""
    found = []
    for process in left_behind(cwd):
        children = Path(f"/proc/{process}/task/{process}/children")
        for child in children.read_text().split() if children.exists() else ():
            # A worker's guard; below that is the worker.
            if str(process_module.__file__).encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(process)
    return found


@pytest.mark.parametrize("launcher", ELSEWHERE)
def test_a_killed_task_is_told_retriable_and_no_hang(tmp_path, launcher):
    command = (*ON_CPU, *ELSEWHERE[launcher])
    process = sleepy(*command, cwd=tmp_path)
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
    wait_for(lambda: left_behind(tmp_path) == [], 10)
    if launcher == "slurm":
        done(sleepy(*command, cwd=tmp_path))
        assert {record.status for record in found(tmp_path, "x")} == {"ok"}


def stored(cwd: Path) -> bool:
    """Whether the sweep's run is in the database, which is opened beside the first jobs."""
    try:
        return bool(runs(cwd))
    except sqlite3.OperationalError:
        return False


@pytest.mark.parametrize(
    ("launcher", "number"), [("slurm", signal.SIGINT), ("slurm", signal.SIGKILL), ("ray", signal.SIGINT)]
)
def test_no_task_outlives_its_parent(tmp_path, launcher, number):
    words = (*(word.replace("budget_s=1", "budget_s=60") for word in ON_CPU), "tracker=mlflow", *ELSEWHERE[launcher])
    process = sleepy(*words, cwd=tmp_path)
    wait_for(lambda: tasks_of(tmp_path) and stored(tmp_path))
    _, out, err = interrupt(process, number)
    assert "Traceback" not in err
    wait_for(lambda: left_behind(tmp_path) == [], 10)
    if number == signal.SIGINT:
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


def test_tasks_go_through_sbatch_and_lease_what_they_get(tmp_path, slurm):
    arguments = ("-m", "backend=eager,flash", "batch=1,2,4", "sweep=x", "tracker=none", "save_plots=false")
    options = ("hydra.launcher.tasks=2", "hydra.launcher.partition=gpu", "hydra.launcher.timeout_min=7")
    out = done(sleepy(*arguments, "hydra/launcher=slurm", *options, cwd=tmp_path, gpus=2))
    assert "2 tasks on slurm: 1234_0, 1234_1\n" in out
    there = found(tmp_path, "x")
    assert [record.status for record in there] == ["ok"] * 6
    assert all(len({record.request.gpu_uuid for record in own}) == 1 for own in _by_case(there))
    asked = (slurm / "options").read_text()
    for option in ("'partition': 'gpu'", "'time': '7'", "'gpus-per-node': '1'", "'array': '0-1%"):
        assert option in asked, asked


def test_an_interrupt_cancels_what_slurm_has(tmp_path, slurm):
    process = sleepy(*ON_CPU, "hydra/launcher=slurm", cwd=tmp_path)
    wait_for(lambda: list(tmp_path.glob(f"multirun/x/*/{FILE_NAME}")))
    _, out, err = interrupt(process)
    assert (process.returncode, complaints(subprocess.CompletedProcess([], 0, "", err))) == (130, [])
    assert "sweep=x" in out.splitlines()[-1]
    wait_for(lambda: left_behind(tmp_path) == [], 10)


@pytest.mark.parametrize("halt", [False, True])
def test_tasks_that_are_still_queued_when_all_is_done_are_cancelled_and_not_waited_for(
    tmp_path, slurm, monkeypatch, halt
):
    monkeypatch.setenv("FAKE_SLURM_NODES", "1")
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    (tmp_path / "conf" / "backend" / "shot.yaml").write_text("_target_: fakes.Honest\nname: shot\nkill: SIGSEGV\n")
    arguments = ("--config-dir", "conf", "-m", "batch=1,2", "sweep=x", "tracker=none", "save_plots=false")
    how = ("backend=shot", "stop_on=[crashed]") if halt else ("backend=eager",)
    process = sleepy(*arguments, *how, "hydra/launcher=slurm", "hydra.launcher.tasks=2", cwd=tmp_path, gpus=1)
    out, err = process.communicate(timeout=40)
    told = complaints(subprocess.CompletedProcess([], 0, "", err))
    assert (process.returncode, told) == (1 if halt else 0, [])
    assert "died" not in out
    # The task may have begun the next job before it learned of the end.
    assert len(found(tmp_path, "x")) in ((1, 2) if halt else (2,))
    wait_for(lambda: (slurm / "job-1234_1").read_text() == "cancelled", 5)
    assert left_behind(tmp_path) == []


def test_what_slurm_refuses_is_told_in_its_words(tmp_path, slurm):
    arguments = (*ON_CPU, "hydra/launcher=slurm", "hydra.launcher.partition=nope")
    process = sleepy(*arguments, cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    said = "Slurm does not take the tasks: sbatch: error: invalid partition specified: nope"
    assert err == f"attn-exp: {said} [docs/troubleshooting.md#ae06]\n"
    assert "no records" not in out and not found(tmp_path, "x")


def _by_case(found: list[Record]) -> list[list[Record]]:
    cases = defaultdict(list)
    for record in found:
        cases[record.request.case].append(record)
    return list(cases.values())


# What is typed wrong.

WRONG = {
    "hydra/launcher=local_gpus": "needs NVIDIA GPUs and there is none here: leave it out",
    "hydra/launcher=local_gpus device=cpu": "takes all GPUs: leave device=cpu out",
    "hydra/launcher=local_gpus device=cuda:1": "takes all GPUs: leave device=cuda:1 out",
    "hydra/launcher=local_gpus isolation=none": "leave hydra/launcher=local_gpus or isolation=none out",
    "hydra/launcher=local_gpu": "the choices are basic, local_gpus, ray, slurm",
    "hydra/launcher=slurm": "needs sbatch and srun: start from a host that submits to Slurm",
    "hydra/launcher=slurm hydra.launcher.partiton=gpu": "did you mean 'hydra.launcher.partition'?",
    "hydra/launcher=slurm hydra.launcher.cluster=lokal": "did you mean 'local'?",
    "hydra/launcher=slurm hydra.launcher.tasks=0": "hydra.launcher.tasks=0 is not a whole number from 1",
    "hydra/launcher=slurm device=cuda:1": "with hydra/launcher=slurm leave device out",
    "hydra/launcher=slurm hydra.launcher.cluster=local device=cuda hydra.launcher.gpus_per_node=null": "needs an NV",
    "hydra/launcher=ray hydra.launcher.num_gpus=-1": "hydra.launcher.num_gpus=-1 is not a number from 0",
    "hydra/launcher=ray hydra.launcher.tasks=many": "hydra.launcher.tasks=many is not a whole number from 1",
    "hydra/launcher=ray hydra.launcher.address=127.0.0.1:1": "does not answer: start it there by ray start --head",
    "hydra/launcher=slurm hydra.launcher.cluster=local +hydra.job.env_set.A=b": "jobs of this process",
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
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == engine else find(name, *more))
    code, _, err = typed(monkeypatch, tmp_path)("-m", "batch=1,2", f"hydra/launcher={launcher}")
    assert (code, err.count("\n")) == (2, 1)
    assert f"hydra/launcher={launcher} needs {engine}: pip install 'attn_exp[{launcher}]'" in err


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


@pytest.mark.parametrize(
    ("typed_in", "words"),
    [
        ("timeout_min=0", "hydra.launcher.timeout_min=0 is not a whole number from 1"),
        ("timeout_min=x", "hydra.launcher.timeout_min=x is not a whole number from 1"),
        ("gpus_per_node=-1", "hydra.launcher.gpus_per_node=-1 is not a whole number from 0"),
        ("additional_parameters=foo", "additional_parameters=foo is no set of options: write"),
    ],
)
def test_what_no_cluster_can_give_is_told_before_a_task_is_queued(tmp_path, monkeypatch, typed_in, words):
    call = typed(monkeypatch, tmp_path)
    code, _, err = call(
        *SLEEPY[:3], "hydra/launcher=slurm", "hydra.launcher.cluster=local", f"hydra.launcher.{typed_in}"
    )
    assert (code, err.count("\n")) == (2, 1) and words in err
    assert not (tmp_path / "multirun").exists()


HEAD = "Job 7 (task: 0) with path /a/b.pkl\nhas not produced any output (state: X)\n"
RAISED = (
    "Job (task=0) failed during processing with trace:\n-----\nTraceback\nValueError: x\n-----\nYou can check full logs"
)
LATE = "slurmstepd: error: *** JOB 7 CANCELLED DUE TO TIME LIMIT ***"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (f"{RAISED} with 'job.stderr(0)'or at paths:\n  - /a/b.err\n  - /a/b.out", "ValueError: x"),
        (
            f"{HEAD}No error stream produced. Look at stdout: /a\n----\nsubmitit INFO (2026) - Loading pickle: /a",
            "it was killed, or ended without a word",
        ),
        (f"{HEAD}Error stream produced:\n-------\n{LATE}\n", LATE),
    ],
    ids=["raised", "killed", "time limit"],
)
def test_why_a_task_died_is_what_its_log_says_and_not_what_submitit_draws_around_it(said, why):
    assert _last_line(RuntimeError(said)) == why


def test_an_engine_that_is_there_and_broken_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "submitit").mkdir()
    (tmp_path / "submitit" / "__init__.py").write_text("raise RuntimeError('does not fit')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "submitit"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"submitit cannot be imported \(does not fit\): pip install"):
        load_engine("submitit", "slurm")
