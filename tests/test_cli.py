import csv
import io
import json
import os
import sqlite3
import subprocess
import sys

import pytest
from cli import QUICK, TESTS, TRACKED, complaints, environment, finished, left_behind, records, run, runs, start
from inprocess import typed

from attn_exp.core.record.file import FILE_NAME

SIZES = tuple(argument for argument in TRACKED if not argument.startswith(("batch=", "passes=")))
SIX = ("backend=flash,cudnn", "batch=1,8,16", *SIZES)
# What is typed, and what the sentence about it must say.
BAD = {
    # an unknown key, choice or group, with the nearest right one
    "bakend=flash": "there is no key 'bakend': did you mean 'backend'?",
    "stopping.budget=1": "did you mean 'stopping.budget_s'?",
    "zzz=1": "there is no key 'zzz': the keys are accumulate, alibi, align, backend",
    "backend=flsh": "backend=flsh does not exist: did you mean 'flash'? the choices are aten_cudnn, auto",
    "experiment=nope": "experiment=nope does not exist: the choices are biases, compile",
    # other programs' ways to write it
    "--backend flash": "there is no flag --backend: choices have no dashes, write backend=VALUE",
    "batch=1, 8, 16": "commas between them and no spaces: python -m attn_exp -m batch=1,8,16",
    "batch=1 8 16": "commas between them and no spaces: python -m attn_exp -m batch=1,8,16",
    "iters=100": "there is no key 'iters': write stopping=quick or stopping=thorough",
    "dropout=0.1": "attn_exp.time(function, q, k, v, reference=...)",
    "heads=4": "did you mean 'model.q_heads'?",
    "scale=1": "there is no key 'scale': the keys are accumulate",
    "batch=${oc.env:BATCH}": """write 'batch="${oc.decode:${oc.env:BATCH}}"'""",
    "-m +repeat=range(3)": "there is no key 'repeat': one of your own has to be used by another, as in seed=",
    "tracker=wandb": "the choices are mlflow, none",
    "+batch=1": "Either remove + prefix: 'batch=1'",
    # a key that nothing reads, which Hydra takes with a +
    "++stopping.budget=1": "there is no key 'stopping.budget': did you mean 'budget_s'?",
    "-m hydra.launcher.tasks=2": "there is no key 'hydra.launcher.tasks' without a launcher: choose hydra/launcher=",
    "model=null": "Hydra cannot compose these overrides (",
    # what is not key=value, and several values without -m
    "flash": "'flash' is neither a command nor key=value: attn-exp --help lists the commands",
    "model.causal=true": "the chosen model has no key 'model.causal': write +model.causal=VALUE to add it",
    # hints that lead on
    "backend=flash backend.rows=64": "the chosen backend has no key 'backend.rows': if its class takes rows, write ++",
    "batch=1,2": "several values need -m (--multirun): python -m attn_exp -m batch=1,2",
    "-z": "unrecognized arguments: -z; flags go before the choices, and python -m attn_exp --hydra-help",
    "batch=1 --config-dir conf seed=1": "unrecognized arguments: seed=1; flags go before the choices",
    "--config-dir nope": "is not a folder",
    # another kind of value, and a reference that leads nowhere
    "passes={}": "Error merging override passes={}",
    "batch=${oc.decode:''}": "what batch refers to by ${...} cannot be found or read (",
    # heads that do not divide
    "model=sdpa_bench model.q_heads=7": "q_heads=7 does not divide model.embedding=2048: use model.q_heads=8",
    "model.kv_heads=5": "kv_heads=5 does not divide q_heads=12: use model.kv_heads=4",
    "model.head_dim=null": "model.head_dim",
    # negative, absurd and other sizes
    "seq_len=99999999999999": "is not a whole number from 1 to",
    "seq_len=1000000 batch=100000": "one tensor of this case takes 279.4 TiB: lower batch or seq_len",
    "causal=maybe": "causal='maybe' is neither true nor false",
    "dtype.name=int16": "is not one of bfloat16, float16, float32",
    # a device that is not there, and a timer that is not for it
    "device=cuda": "needs an NVIDIA GPU and there is none here: use device=cpu or device=auto",
    "device=gpu": "is none of auto, cpu, cuda, cuda:N",
    "-m device=cpu,cuda": "device is one for the whole sweep",
    "timer=kernel": "use timer=auto, or one of benchmark, cpu",
    # measuring options
    "passes=[sideways]": "use [forward,backward]",
    "passes=[bakward]": "did you mean 'backward'?",
    "stopping.precision=0": "is not between 0 and 1",
    "stopping.min_rounds=1": "2 <= min_rounds <= max_rounds <= 10000",
    # where things run and go
    "isolation.timeout_s=-3": "is not a positive number of seconds",
    "hydra/launcher=nope": "hydra/launcher=nope does not exist: the choices are basic",
    "-m hydra.launcher._target_=their.Launcher": "leave hydra/launcher out",
    "tracker.uri=mlruns": "use tracker.uri=sqlite:///mlruns/mlflow.db",
    "tracker.uri=sqlite:////proc/x/mlflow.db": "choose another with tracker.uri=",
    "tracker.uri=sqlite:///newer.db": "was written by a newer MLflow",
    "folder=a_file": "choose another with folder=...",
    "sweep=../x": "cannot name a folder",
    "++backend.foo=1": "backend=auto has no option 'foo': its options are deterministic",
    "backend=cudnn_graph ++backend.lay=bshd": "backend=cudnn_graph has no option 'lay': did you mean 'layout'?",
    "backend._target_=null": "backend._target_=package.module.Class",
    # what only looks like a sweep, and what is taken away
    "-m save_plots=true,false": "save_plots is one for the whole sweep",
    "timer.also=[foo]": "timer.also has 'foo': the timers are benchmark, cpu",
    "profiler=torch profiler.torch.calls=often": "profiler.torch.calls=often is not a whole number from 1 on; it is 5",
    "profiler=ncu profiler.ncu.metrics=sm": "profiler.ncu.metrics=sm is not a list: write [...]",
    "-m batch=glob(*)": "there is no job in this sweep",
    "~batch": "leave ~batch out",
}


@pytest.fixture
def call(monkeypatch, tmp_path):
    (tmp_path / "a_file").write_text("in the way " * 200)
    with sqlite3.connect(tmp_path / "newer.db") as database:
        database.execute("create table experiments (name varchar(256))")
        database.execute("create table alembic_version (version_num varchar(32))")
        database.execute("insert into alembic_version values ('ffffffffffff')")
    return typed(monkeypatch, tmp_path)


@pytest.mark.parametrize("line", BAD)
def test_bad_input_stops_with_one_sentence_before_any_work(call, tmp_path, monkeypatch, line):
    monkeypatch.setenv("BATCH", "4")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call(*line.split())
    assert code == 2
    assert err.startswith("attn-exp: ")
    assert err.count("\n") == 1
    assert BAD[line] in err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"q_heads: [1\nb: : 2\n", ", line 2, is no YAML: expected ',' or ']', but got ':'"),
        (b"q_heads: 3\nq_heads: 4\n", ", line 2, is no YAML: found duplicate key q_heads"),
        (b"\tq_heads: 3\n", ", line 1, is no YAML: found character '\\t' that cannot start any token"),
        (b"q_heads: \xff\xfe\n", "(UnicodeDecodeError: "),
        (b"- q_heads\n", "the chosen model is a list: each line of its file has the form key: value"),
    ],
)
def test_a_mistake_in_a_file_of_one_s_own_is_one_sentence(call, tmp_path, content, said):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_bytes(content)
    for words in ([], ["duel", "a=flash", "b=math"]):
        code, out, err = call(*words, "--config-dir", "conf", "model=mine")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err and "Traceback" not in err


def test_a_folder_without_leave_is_told(call, tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path) and may(path, mode))
    code, _, err = call("folder=theirs")
    assert (code, err.count("\n")) == (2, 1)
    assert "theirs (Permission denied): choose another with folder=..." in err
    assert list((tmp_path / "theirs").iterdir()) == []
    assert not (tmp_path / "mlruns").exists()


def test_a_dry_run_lists_and_starts_nothing(call, tmp_path):
    code, out, err = call("-m", "dry_run=true", "device=cpu", "model.q_heads=12,16", "model.kv_heads=3,4", "sweep=s")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["would", "would", "impossible", "would"]
    assert "kv_heads=3 does not divide q_heads=16" in lines[2]
    assert lines[4:] == ["4 jobs: 3 would run, 0 are done, 1 are impossible"]
    code, out, err = call("dry_run=true", "device=cpu", "backend=math")
    assert (code, err) == (0, "")
    assert out.startswith("would run          math b1 h12 s256 d64 fp32 causal  on cpu by timer cpu, folder math-")
    # There are as many heads of keys and values, unless a model has fewer.
    assert " b1 h4 s256 " in call("dry_run=true", "device=cpu", "model.q_heads=4")[1]
    assert {path.name for path in tmp_path.iterdir()} == {"a_file", "newer.db"}


@pytest.mark.parametrize(
    "flag", [["--help"], ["-h"], ["--cfg", "job"], ["--cfg=job"], ["-i", "defaults"], ["-sc", "install=fish"]]
)
def test_questions_to_hydra_are_answered_and_start_nothing(call, monkeypatch, tmp_path, flag):
    started = []
    monkeypatch.setattr("attn_exp.commands.run.start_ahead", started.append)
    monkeypatch.setenv("COMP_LINE", "attn-exp backend=fl")
    code, out, err = call(*flag)
    assert (code, err, started) == (0, "", [])
    assert out
    assert {path.name for path in tmp_path.iterdir()} == {"a_file", "newer.db"}
    call("batch=0")
    assert len(started) == 1


def test_help_names_every_group_and_the_commands(call):
    out = call("run", "--help")[1]
    for word in ("model", "dtype", "backend", "timer", "tracker", "isolation", "experiment", "-m backend=flash,cudnn"):
        assert word in out
    assert "attn-exp ui" in out and "attn-exp --help" in out


# From here on, whole processes.


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """The six jobs of the README's command, `-m` at its end, from a folder that is not the checkout."""
    folder = tmp_path_factory.mktemp("elsewhere")
    return folder, run(*SIX, "sweep=six", "-m", cwd=folder)


def test_six_jobs_from_another_folder(six):
    folder, done = six
    assert done.returncode == 0, done.stderr
    assert complaints(done) == []
    found = records(folder, "six")
    assert sorted(record.request.case.batch for record in found.values()) == [1, 1, 8, 8, 16, 16]
    statuses = {(record.request.backend["name"], record.status) for record in found.values()}
    assert statuses == {("flash", "ok"), ("cudnn", "unsupported")}
    assert sum(tags.get("attn_exp.kind") == "job" for _, _, tags in runs(folder)) == 6
    assert left_behind(folder) == []


def test_output_of_a_sweep_fits_the_terminal_and_says_what_is_next(six):
    _, done = six
    lines = done.stdout.splitlines()
    assert [line.split("]")[0] for line in finished(done)] == [f"[{number}/6" for number in range(1, 7)]
    assert [line for line in lines if len(line) > 120] == []
    # One backend alone: there is nothing to pick. The table; where all is, and what to type next.
    assert "NO PICK" not in done.stdout and "times as fast" not in done.stdout
    assert lines[-3:] == [
        "records and table.csv are in multirun/six",
        "look at them with: attn-exp ui six",
        "compare: attn-exp compare six",
    ]
    assert sum(line.startswith("flash ") for line in lines) == 3
    assert any(line.startswith("* cudnn runs only on NVIDIA GPUs") for line in lines)


def test_the_csv_says_what_the_records_say(six):
    folder, done = six
    text = (folder / "multirun" / "six" / "table.csv").read_text()
    rows = {row["job"]: row for row in csv.DictReader(io.StringIO(text))}
    found = records(folder, "six")
    assert set(rows) == {record.request.job for record in found.values()}
    for record in found.values():
        row = rows[record.request.job]
        assert row["status"] == record.status
        assert row["reason"] == (record.reason or "")
        assert int(row["batch"]) == record.request.case.batch
        for name in ("forward/time_us", "backward/time_us", "forward/tflops", "backward/error_dq"):
            wanted = record.metrics.get(name)
            assert row[name] == ("" if wanted is None else f"{wanted:.6g}")
    assert (folder / "multirun" / "six" / "table.txt").read_text() in done.stdout


def test_the_same_command_again_keeps_all_and_a_dry_run_says_so(six, monkeypatch):
    folder, _ = six
    call = typed(monkeypatch, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.glob(f"multirun/six/*/{FILE_NAME}")}
    # Nobody asks the backends here: the job of cudnn that is not done would run.
    code, out, _ = call("-m", *SIX, "sweep=six", "batch=1,8,16,32", "dry_run=true")
    assert code == 0 and "8 jobs: 2 would run, 6 are done, 0 are impossible" in out.splitlines()
    code, _, err = call("-m", *SIX, "sweep=six")
    assert (code, err) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in folder.glob(f"multirun/six/*/{FILE_NAME}")} == before
    assert len(runs(folder)) == 7
    # So do records alone, as archives have them.
    for path in before:
        kept = folder / "multirun" / "kept" / path.parent.name / FILE_NAME
        kept.parent.mkdir(parents=True)
        kept.write_bytes(path.read_bytes())
    code, _, err = call("-m", *SIX, "sweep=kept")
    assert (code, err) == (0, "")
    assert all(
        path.read_bytes() == (folder / "multirun" / "kept" / path.parent.name / FILE_NAME).read_bytes()
        for path in before
    )


def test_cases_without_a_name_that_are_started_together_get_a_folder_each(tmp_path):
    named = []
    for process in [start("backend=flash", *QUICK, cwd=tmp_path) for _ in range(2)]:
        done = subprocess.CompletedProcess([], 0, *process.communicate(timeout=280))
        assert process.returncode == 0, done.stderr
        assert [line[:8] for line in finished(done)] == ["[1/1] ok"]
        named.append(done.stdout.splitlines()[-1].rpartition(" are in multirun/")[2])
        assert [record.status for record in records(tmp_path, named[-1]).values()] == ["ok"]
    assert sorted(named) == sorted(path.name for path in (tmp_path / "multirun").iterdir())
    assert not (tmp_path / "mlruns").exists()


def test_a_reader_who_leaves_does_not_hurt_the_sweep(tmp_path):
    process = start("-m", "backend=flash,math,eager", "sweep=s", *QUICK, cwd=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=240) == 0
    assert complaints(subprocess.CompletedProcess([], 0, "", err)) == []
    assert set(records(tmp_path, "s")) == {"flash", "math", "eager"}
    assert (tmp_path / "multirun" / "s" / "table.csv").exists()


@pytest.mark.parametrize(("backend", "code"), [("raises", 1), ("cudnn", 0)])
def test_a_sweep_without_a_number_fails_unless_nothing_is_supported(call, monkeypatch, backend, code):
    monkeypatch.setattr("attn_exp.worker.__main__.limit_memory", lambda: None)
    words = ("-m", f"backend={backend}", "batch=1,2", "sweep=s", *QUICK, "isolation=none")
    assert call("--config-dir", str(TESTS / "conf"), *words)[0] == code


# Says at the end what was imported.
_PROBE = """
import os, sys
from attn_exp.cli import main
leave = os._exit
def told(code):
    unused = ("torch", "mlflow", "numpy", "pandas", "matplotlib", "tabulate", "rich", "attn_exp.sweep.dry_run")
    heavy = [name for name in unused if name in sys.modules]
    print(f"exit {code} heavy {heavy}", file=sys.stderr, flush=True)
    leave(code)
os._exit = told
main()
"""


def test_a_reader_of_the_help_that_leaves_early_is_no_error(tmp_path):
    shell = f"{sys.executable} -m attn_exp --help | true"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("typed_in", "code"), [("--help", 0), ("batch=0", 2)])
def test_help_and_a_typo_import_nothing_heavy(tmp_path, typed_in, code):
    command = [sys.executable, "-c", _PROBE, typed_in]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == f"exit {code} heavy []"
    assert list(tmp_path.iterdir()) == []


def test_a_typo_kills_the_worker_that_was_started_ahead(tmp_path):
    done = run("batch=0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("attn-exp: batch=0 is not a whole number from 1 to 1,048,576\n")
    assert left_behind(tmp_path) == []


def test_the_requests_configuration_holds_no_secret(six):
    folder, _ = six
    for path in folder.glob(f"multirun/six/*/{FILE_NAME}"):
        config = json.loads(path.read_text())["request"]["config"]
        assert not {"tracker", "folder", "dry_run", "hydra"} & set(config)
        assert config["batch"] in (1, 8, 16)
