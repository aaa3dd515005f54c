"""No change of the code makes a job another job: sweeps that were measured before are found done, and read as before.

`fixtures/identity/` was made by commit a5253c4 on a CPU, in a checkout at /tmp/house:

- `commands.json`: the commands that were run, by the name of their sweep, where PYTHONPATH was
  tests:examples/custom_backend.
- `sweeps.tar.xz`: what they left in `multirun/` and `mlruns/`, without pictures and tables for people. In place of the
  names of the host, its kernel and its user stand `host`, `Linux` and `user`.
- `jobs.json`: for further commands, the names of the jobs that they would run on a host with two GPUs.
- `numbers.json`: the numbers that comparisons of these sweeps said, as JSON.

They are never made again: a name or number that changed means that users measure again, or read something else.
"""

import csv
import json
import re
import sqlite3
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import cli
import inprocess
import pytest

from attn_exp.commands.compare import main as compare_main
from attn_exp.config import request
from attn_exp.core.host import nvml
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.core.record.file import read_record
from attn_exp.core.record.record import METHOD_VERSION, SCHEMA
from attn_exp.execution import job_queue
from attn_exp.results import store

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).resolve().parent / "fixtures" / "identity"
# Where the sweeps were made.
MADE_IN = "/tmp/house"
COMMANDS = json.loads((KEPT / "commands.json").read_text())
SWEEPS = {name: one["arguments"] for name, one in COMMANDS.items() if one["module"] == "attn_exp"}
JOBS = json.loads((KEPT / "jobs.json").read_text())
NUMBERS = json.loads((KEPT / "numbers.json").read_text())
VALUES = re.compile(r"time_us$|tflops$")
# Jobs that an experiment has now beside those that it had: cudnn_notebook runs the graph's second API too.
ADDED = {"cudnn_graph-baef2fd8a6"}
# And what an experiment had in another choice of its own.
HAD = {"-m +experiment=table": "backend=flash,cudnn,aten_cudnn,cudnn_graph,efficient,flex,triton,fa4,helion"}
# These give a backend an option that it does not have. Their jobs ended `unavailable`; now nothing starts.
REFUSED = {
    "missing": SWEEPS.pop("missing"),
    **{
        arguments: arguments.split()
        for arguments in (
            "+backend.tile=16 backend=triton",
            "++backend.nested={b:[1,2.5,null],a:{z:true,y:text}} backend=triton",
        )
        if JOBS.pop(arguments)
    },
}
# Statuses that another try may change, by sweep: these jobs run again.
TRIED_AGAIN = {"failed": {"segfaults": "crashed", "raises": "error", "exits": "crashed", "hangs": "timeout"}}
# How many choices the commands combine: `stopped` ends before its last one. Of `timers` several are one job, told once.
CHOICES = {"stopped": 3}
GPUS = [GpuInfo(index=index, uuid=f"GPU-{index}", name="NVIDIA H200") for index in range(2)]
JOB = re.compile(r"\b[\w.+-]+-[0-9a-f]{10}\b")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A folder with the sweeps as they were left, and what their commands name."""
    folder = tmp_path_factory.mktemp("house")
    with tarfile.open(KEPT / "sweeps.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for name in ("tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    # MLflow names places whole: the store is moved as its users move one.
    with sqlite3.connect(folder / "mlruns" / "mlflow.db") as database:
        for table, column in (("runs", "artifact_uri"), ("experiments", "artifact_location"), ("tags", "value")):
            database.execute(f"update {table} set {column} = replace({column}, ?, ?)", (MADE_IN, str(folder)))
    return folder


@pytest.fixture
def typed(house, monkeypatch):
    """The command line in this folder, on a host without a GPU, where no worker may start.

    Backends from elsewhere are those of these tests, whose source changes with every commit and makes other jobs
    (tests/test_source.py): without it their jobs are the ones that they were.
    """
    monkeypatch.setattr("attn_exp.config.request.described", lambda target: {})
    # A newer method measures jobs of the same names again (tests/test_turns_of_a_sweep.py): here nothing is measured.
    for module in (store, job_queue):
        monkeypatch.setattr(module, "METHOD_VERSION", "2")
    return inprocess.typed(monkeypatch, house)


@pytest.fixture
def with_gpus(typed, monkeypatch):
    """The same on a host with two GPUs."""
    monkeypatch.setattr(nvml, "list_gpus", lambda: GPUS)
    return typed


def listed(typed: inprocess.Typed, arguments: list[str]) -> list[tuple[str, str]]:
    """The jobs that these arguments make, in order, each with the line that `dry_run=true` prints of it."""
    code, out, err = typed(*arguments, "dry_run=true")
    assert (code, beyond_hints(err)) == (0, [])
    lines = [(JOB.findall(line), line) for line in out.splitlines()]
    return [(names[-1], line) for names, line in lines if names]


def beyond_hints(err: str) -> list[str]:
    """What stands on standard error, without hints at newer spellings: the kept commands are as old as the records."""
    newer = ("hint:", "backend.api is no option of cudnn and eager")
    return [line for line in cli.without_progress(err) if not line.startswith(newer)]


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a sweep by job, as plain JSON."""
    return {path.parent.name: json.loads(path.read_bytes()) for path in folder.glob("*/record.json")}


def content(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Every record's bytes, and when it was written."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*/record.json")}


def table(folder: Path) -> dict[str, dict[str, str]]:
    """`table.csv` by job."""
    with (folder / "table.csv").open(newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def numbers(tree: Any) -> list[float]:
    """All numbers in a tree of JSON."""
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in numbers(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in numbers(value)]
    return [float(tree)] if isinstance(tree, (int, float)) and not isinstance(tree, bool) else []


def said(capsys: pytest.CaptureFixture[str], arguments: str) -> list[float]:
    """The measured values that a comparison says."""
    # Sweeps are named without a key, as `attn-exp compare` does today.
    code = compare_main([*arguments.removeprefix("sweep=").split(), "format=json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return [value for row in json.loads(out)["rows"] for key, value in row.items() if VALUES.search(key) and value]


# Those of the others are held by the next test, which measures nothing only if their jobs have the same names.
@pytest.mark.parametrize("sweep", [*TRIED_AGAIN, "stopped", "backends"])
def test_a_command_makes_the_jobs_that_it_made_before(typed, house, sweep):
    kept = records(house / "multirun" / sweep)
    jobs = listed(typed, SWEEPS[sweep])
    assert len(jobs) == CHOICES.get(sweep, len(kept))
    assert {job for job, _ in jobs} - set(kept) == ({"math-808cf0250d"} if sweep == "stopped" else set())
    assert set(kept) <= {job for job, _ in jobs}
    again = TRIED_AGAIN.get(sweep, {})
    for job, line in jobs:
        if job in kept:
            status = again.get(job.rsplit("-", 1)[0])
            assert status in (None, kept[job]["status"])
            assert (f"({kept[job]['status']})" in line) == (status is None), line


@pytest.mark.parametrize("sweep", [name for name in SWEEPS if name not in TRIED_AGAIN])
def test_a_sweep_that_was_made_before_is_finished_without_measuring(typed, house, sweep, monkeypatch):
    as_typed(monkeypatch, SWEEPS[sweep])
    folder = house / "multirun" / sweep
    before, rows, runs = content(folder), table(folder), Counter(name for name, *_ in cli.runs(house))
    code, out, err = typed(*SWEEPS[sweep])
    assert (code, beyond_hints(err)) == (1 if sweep == "stopped" else 0, [])
    assert content(folder) == before
    if sweep != "stopped":
        count = CHOICES.get(sweep, len(before))
        assert f"{count} of {count} jobs" in out
    # The table is written again, from the same records.
    assert {job: {key: row.get(key) for key in rows[job]} for job, row in table(folder).items()} == rows
    # The store has one run a job, as before, of the sweep too.
    assert Counter(name for name, *_ in cli.runs(house)) == runs


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_a_backend_does_not_have_is_refused_before_anything_starts(with_gpus, name):
    code, out, err = with_gpus(*REFUSED[name], "dry_run=true")
    assert (code, out) == (2, "")
    assert "has no option" in err


@pytest.mark.parametrize("arguments", JOBS, ids=lambda text: text or "nothing")
def test_a_job_on_a_gpu_has_the_name_that_it_had(with_gpus, arguments, monkeypatch):
    as_typed(monkeypatch, arguments.split())
    had = HAD.get(arguments, "").split()
    jobs = [job for job, _ in listed(with_gpus, [*arguments.split(), *had, *stopping(arguments)])]
    # Listed case by case: in the order of the overrides when the names were kept.
    assert sorted(job for job in jobs if job not in ADDED) == sorted(JOBS[arguments])


def as_typed(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Hash a regime that is chosen under its own name, as when the names were kept: today's default has the other's."""
    if any(word.startswith("regime=") or word == "+experiment=published" for word in arguments):
        monkeypatch.setattr(request, "_REGIMES_HASHED", {name: name for name in request.REGIMES})


def stopping(arguments: str) -> list[str]:
    """The numbers of the stopping rule when the names were kept; method 4 has more rounds."""
    kept = {"min_rounds": "5" if "sdpa_sweep" in arguments else "7", "max_rounds": "40"}
    return [f"stopping.{key}={value}" for key, value in kept.items() if f"stopping.{key}=" not in arguments]


def test_a_duel_has_the_jobs_that_it_had(typed, house):
    words = COMMANDS["duel"]["arguments"]
    shared = [word for word in words if not re.match(r"[abc][.=]|folder=", word)]
    for letter, backend in (("a", "flash"), ("b", "math"), ("c", "eager")):
        [(job, _)] = listed(typed, [f"backend={backend}", "stopping.budget_s=5", *shared])
        assert (house / "multirun" / "duel" / f"{letter}-{job}" / "record.json").exists()


def test_versions_are_those_of_the_records(house):
    kept = [record for sweep in COMMANDS for record in records(house / "multirun" / sweep).values()]
    assert len(kept) > 100
    assert {record["schema"] for record in kept} == {SCHEMA}
    # That of the commit that left them: a newer method measures otherwise, and reads what older ones left.
    assert {record["method_version"] for record in kept} == {"2"}
    assert int(METHOD_VERSION) >= 2


def test_every_record_is_read_whole(house):
    for path in house.glob("multirun/*/*/record.json"):
        kept, record = json.loads(path.read_bytes()), read_record(path.parent)
        assert record is not None
        assert (record.request.job, record.status, record.reason) == (path.parent.name, kept["status"], kept["reason"])
        assert record.metrics == kept["metrics"]
        samples = {name: [list(one.times_us) for one in each.timings] for name, each in record.passes.items()}
        assert samples == {name: [one["times_us"] for one in each["timings"]] for name, each in kept["passes"].items()}


@pytest.mark.parametrize("arguments", NUMBERS)
def test_a_comparison_says_the_values_that_it_said(house, arguments, monkeypatch, capsys):
    """Gains and winners follow from decisions, which have changed since."""
    monkeypatch.chdir(house)
    today = said(capsys, arguments)
    assert today and not Counter(today) - Counter(NUMBERS[arguments])


@pytest.mark.parametrize("target", ["backends", "profiled/flash", "failed/segf", "tracked/math", "dit_block/flash"])
def test_a_page_explains_what_was_measured_before(house, target):
    ran = cli.run("explain", target, cwd=house)
    assert ran.returncode == 0, ran.stderr
    sweep, _, job = target.partition("/")
    for name, record in records(house / "multirun" / sweep).items():
        if name.startswith(job) and record["status"] == "ok":
            assert record["request"]["backend"]["name"] in ran.stdout
