"""MLflow's tracker against real MLflow on sqlite, in a folder of the test's own."""

import importlib.util
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import cli
import pytest

from attn_exp.commands.log import main as log_main
from attn_exp.core.case import Case
from attn_exp.core.errors import UserError
from attn_exp.core.profile import Profile
from attn_exp.core.record import Kernel, PassRecord, Record, Timing
from attn_exp.core.record_file import write_record
from attn_exp.core.redaction import redacted
from attn_exp.core.request import Measuring, Request
from attn_exp.core.status import Status
from attn_exp.tracking import SweepInfo, client, location, make_tracker
from attn_exp.tracking.background import Background
from attn_exp.tracking.page import NOTE

# Not importorskip: processes that import this module would import MLflow before the tracker has silenced it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")

# What a record needs to be read again.
TIMES = {"forward/time_us": 2.5, "backward/time_us": 2.5}


def a_record(
    job: str = "flash-1", status: Status = "ok", finished_at: float = 1_700_000_002.5, **changes: Any
) -> Record:
    case = Case(
        batch=8, q_heads=16, kv_heads=16, q_len=1024, kv_len=1024, head_dim=128, value_dim=128,
        dtype="bfloat16", causal=True,
    )  # fmt: skip
    measuring = Measuring(
        timer="cpu", also=(), precision=0.005, min_rounds=7, max_rounds=40, budget_s=1.5, regime="sustained",
        passes=("forward", "backward"), seed=123,
    )  # fmt: skip
    request = Request(
        job=job, sweep="first", model="gpt2", device="cpu", case=case, measuring=measuring,
        backend={"name": "flash", "_target_": "a.B", "tiles": {"rows": 64}},
    )  # fmt: skip
    blocks = ((0, 1_700_000_000.25, 1_700_000_000.5), (0, 1_700_000_000.75, 1_700_000_001.0))
    timing = Timing(
        timer="cpu", l2="warm", times_us=(1.5, 2.5, 3.5), rounds=(0, 0, 1), stop_reason="max_rounds", blocks=blocks
    )
    kernels = (Kernel(name="short", count=1, time_us=1), Kernel(name="long" * 100, count=1, time_us=2))
    ok = status == "ok"
    values: dict[str, Any] = {
        "passes": {
            "forward": PassRecord(timings=(timing,), kernels=kernels, flags=("drift",)),
            "backward": PassRecord(),
        }
        if ok
        else {},
        "metrics": {"forward/time_us": 2.5, "forward/broken": float("inf")} if ok else {},
        "reason": None if ok else "because",
        "flags": ("drift", "unstable") if ok else (),
        "environment": {"cpu": "A CPU", "versions": {"torch": "2.13"}, "git_commit": "abc"},
        "started_at": 1_700_000_000.0,
    }
    return Record(request=request, status=status, finished_at=finished_at, **(values | changes))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in client.ENVIRONMENT:
        monkeypatch.setenv(name, client.ENVIRONMENT[name])
    return tmp_path


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that MLflow has set up once: that takes most of a test's time."""
    folder = tmp_path_factory.mktemp("migrated")
    tracker = make_tracker(config(folder))
    tracker.open(SweepInfo("other", folder, "command"))
    assert tracker.close("FINISHED", ()) is None
    return folder / "mlflow.db"


@pytest.fixture
def ready(place: Path, migrated: Path) -> Path:
    (place / "mlflow.db").write_bytes(migrated.read_bytes())
    return place


def config(folder: Path) -> dict[str, Any]:
    return {
        "name": "mlflow", "uri": f"sqlite:///{folder}/mlflow.db", "artifacts": str(folder / "artifacts"),
        "mlflow_experiment": "attn_exp",
    }  # fmt: skip


def logged(place: Path, *records: Record, sweep: str = "first", **closing: Any) -> str | None:
    tracker = make_tracker(config(place))
    tracker.open(SweepInfo(sweep, place / sweep, "python -m attn_exp tracker.uri=http://me:secret@host:5000"))
    for record in records:
        folder = place / sweep / record.request.job
        folder.mkdir(parents=True, exist_ok=True)
        write_record(record, folder)
        tracker.log(record, folder)
    return tracker.close(closing.pop("status", "FINISHED"), closing.pop("artifacts", ()), **closing)


def runs_of(place: Path, sweep: str = "first", condition: str = "") -> tuple[Any, list[Any]]:
    """The sweep's parent run and its children, as MLflow's own client finds them."""
    from mlflow import MlflowClient

    mlflow_client = MlflowClient(f"sqlite:///{place}/mlflow.db")
    experiment = mlflow_client.get_experiment_by_name("attn_exp")
    assert experiment is not None
    found = mlflow_client.search_runs([experiment.experiment_id], condition)
    (parent,) = [
        run for run in found
        if run.data.tags["attn_exp.kind"] == "sweep" and run.data.tags["attn_exp.sweep"] == sweep
    ]  # fmt: skip
    children = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    return parent, sorted(children, key=lambda run: str(run.data.tags.get("attn_exp.job")))


def artifacts_of(run: Any) -> set[str]:
    return {path.name for path in Path(run.info.artifact_uri.removeprefix("file://")).iterdir()}


def test_a_sweep_is_a_parent_run_with_one_child_a_job(place: Path) -> None:
    (place / "first").mkdir()
    table = place / "first" / "table.csv"
    table.write_text("a,b\n")
    records = (a_record("a"), a_record("b", "unsupported"), a_record("c", "crashed"))
    assert logged(place, *records, artifacts=[table, place / "absent"]) is None
    parent, children = runs_of(place)
    assert (parent.info.run_name, parent.info.status, artifacts_of(parent)) == ("first", "FINISHED", {"table.csv"})
    assert parent.data.tags["attn_exp.command"] == "python -m attn_exp tracker.uri=http://host:5000"
    assert [run.info.status for run in children] == ["FINISHED", "FINISHED", "FAILED"]
    assert [run.data.tags["attn_exp.status"] for run in children] == ["ok", "unsupported", "crashed"]
    assert [run.data.tags.get("attn_exp.reason") for run in children] == [None, "because", "because"]
    run = children[0]
    assert run.info.run_name == "flash ? s1024 b8 causal h16 d128 bf16"
    assert (run.info.start_time, run.info.end_time) == (1_700_000_000_000, 1_700_000_002_500)
    assert run.data.metrics == {"forward/time_us": 2.5}
    wanted = {
        "batch": "8", "seq_len": "1024", "causal": "True", "backend": "flash", "backend.tiles.rows": "64",
        "model": "gpt2", "device": "cpu", "timer": "cpu", "passes": "forward+backward", "seed": "123",
        "stopping.precision": "0.005",
    }  # fmt: skip
    assert wanted.items() <= run.data.params.items()
    assert run.data.tags["attn_exp.flags"] == "drift (forward), unstable"
    assert run.data.tags[NOTE] == (
        f"forward: **2.5 us**  \n[the sweep's answer](#/experiments/{run.info.experiment_id}/runs/{parent.info.run_id})"
    )
    assert children[1].data.tags[NOTE].startswith("**unsupported: because**  \n[the sweep's answer](")
    # The name has the case, a parameter the backend.
    assert not {"attn_exp.label", "attn_exp.shape"} & run.data.tags.keys()
    assert run.data.tags["attn_exp.gpu"] == "A CPU"
    assert len(run.data.tags["attn_exp.kernel_forward"]) == 250
    assert artifacts_of(run) == {"record.json", "samples.csv"}
    samples = Path(run.info.artifact_uri.removeprefix("file://"), "samples.csv").read_text().splitlines()
    assert samples == [
        "pass,timer,round,index,time_us,round_at",
        *(f"forward,cpu,{r},{i},{i + 1}.5,{'' if r else '1700000000.250000'}" for i, r in enumerate((0, 0, 1))),
    ]
    assert {path.name for path in (place / "first" / "a").iterdir()} == {"record.json"}


def test_a_run_that_an_earlier_version_stored_is_not_stored_again(ready: Path) -> None:
    from mlflow import MlflowClient

    assert logged(ready, a_record("a")) is None
    _, (child,) = runs_of(ready)
    assert child.data.tags["attn_exp.finished_at"] == "2023-11-14 22:13:22.500000 UTC"
    MlflowClient(config(ready)["uri"]).set_tag(child.info.run_id, "attn_exp.finished_at", "1700000002.5")
    assert logged(ready, a_record("a")) is None
    assert [run.info.run_id for run in runs_of(ready)[1]] == [child.info.run_id]


def test_the_same_sweep_again_stores_nothing_twice_and_replaces_a_retried_job(ready: Path) -> None:
    failed = a_record("b", "crashed")
    assert logged(ready, a_record("a"), failed, failed, status="KILLED") is None
    parent, children = runs_of(ready)
    assert (parent.info.status, len(children)) == ("KILLED", 2)
    assert logged(ready, a_record("a"), a_record("b", finished_at=1_700_000_009.0), a_record("c")) is None
    again, resumed = runs_of(ready)
    assert (again.info.run_id, again.info.status) == (parent.info.run_id, "FINISHED")
    assert [run.data.tags["attn_exp.status"] for run in resumed] == ["ok", "ok", "ok"]
    assert [run.info.status for run in resumed] == ["FINISHED"] * 3
    assert resumed[0].info.run_id == children[0].info.run_id
    assert resumed[1].info.run_id != children[1].info.run_id


def test_of_two_processes_that_measured_one_job_the_record_that_lies_in_its_folder_is_kept(ready: Path) -> None:
    slow, folder = make_tracker(config(ready)), ready / "first" / "a"
    folder.mkdir(parents=True)
    slow.open(SweepInfo("first", ready / "first", ""))
    slow.settle()
    assert logged(ready, a_record("a", finished_at=1_700_000_009.0, metrics=TIMES)) is None
    slow.log(a_record("a", "error"), folder)
    assert slow.close("FINISHED", ()) is None
    _, (child,) = runs_of(ready)
    assert (child.info.status, child.data.tags["attn_exp.finished_at"]) == (
        "FINISHED",
        "2023-11-14 22:13:29.000000 UTC",
    )


def test_a_database_that_is_busy_when_a_sweep_has_ended_lacks_nothing(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr("attn_exp.tracking.runs.sqlite3.connect", locked)
    monkeypatch.setattr("attn_exp.tracking.runs.jobs_in_database", lambda *_: [])
    assert logged(ready, a_record("a")) is None
    monkeypatch.undo()
    assert runs_of(ready)[0].info.status == "FINISHED"


def test_a_replay_stores_the_pages_of_profiled_jobs_too(
    ready: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ready / "first" / "a" / "profiles"
    own.mkdir(parents=True)
    (own / "explain.txt").write_text("what bounds it")
    write_record(a_record("a", metrics=TIMES, profiles={"torch": Profile(status="ok")}), own.parent)
    place = [f"tracker.{key}={value}" for key, value in config(ready).items() if key in ("uri", "artifacts")]
    assert log_main(["./first", *place]) == 0, capsys.readouterr()
    _, (child,) = runs_of(ready)
    stored = Path(child.info.artifact_uri.removeprefix("file://"), "profiles", "explain.txt")
    assert stored.read_text() == "what bounds it"


def test_a_killed_process_leaves_no_job_running_and_its_sweep_is_taken_up(ready: Path) -> None:
    tracker = make_tracker(config(ready))
    tracker.open(SweepInfo("first", ready / "first", ""))
    tracker.log(a_record("a"), ready)
    tracker.settle()
    parent, children = runs_of(ready)
    assert (parent.info.status, [run.info.status for run in children]) == ("RUNNING", ["FINISHED"])
    assert logged(ready, a_record("a"), a_record("b")) is None
    again, children = runs_of(ready)
    assert (again.info.run_id, again.info.status, len(children)) == (parent.info.run_id, "FINISHED", 2)


def test_a_job_cut_short_while_it_was_stored_is_stored_again(ready: Path) -> None:
    assert logged(ready, a_record("a")) is None
    _, (before,) = runs_of(ready)
    with sqlite3.connect(ready / "mlflow.db") as database:
        database.execute("UPDATE runs SET status = 'RUNNING' WHERE run_uuid = ?", (before.info.run_id,))
    assert logged(ready, a_record("a")) is None
    _, (after,) = runs_of(ready)
    assert after.info.run_id != before.info.run_id
    assert after.info.status == "FINISHED"


def test_sweeps_of_one_name_in_two_folders_are_two_sweeps(ready: Path) -> None:
    for folder in ("one", "two"):
        tracker = make_tracker(config(ready))
        tracker.open(SweepInfo("same", ready / folder, ""))
        tracker.log(a_record("a"), ready)
        assert tracker.close("FINISHED", ()) is None
    with sqlite3.connect(ready / "mlflow.db") as database:
        rows = database.execute("SELECT count(*) FROM tags WHERE key = 'mlflow.parentRunId'").fetchone()
        live = database.execute("SELECT count(*) FROM runs WHERE lifecycle_stage = 'active'").fetchone()
    assert (rows[0], live[0]) == (2, 5)


def test_statistics_are_there_after_a_sweep(ready: Path) -> None:
    logged(ready, a_record("a"))
    with sqlite3.connect(ready / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM sqlite_stat1").fetchone()[0] > 0


def test_one_job_that_cannot_be_stored_is_a_warning_and_the_others_are_stored(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    original = mlflow.MlflowClient.log_batch

    def failing(self: Any, run_id: str, *given: Any) -> Any:
        if self.get_run(run_id).data.tags.get("attn_exp.job") == "b":
            raise OSError("disk full at http://me:secret@host\nand more")
        return original(self, run_id, *given)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", failing)
    warning = logged(ready, a_record("a"), a_record("b"), a_record("c"))
    assert warning is not None
    assert "lacks 1 record (disk full at http://host)" in warning
    assert f"store them with: attn-exp log ./first uri=sqlite:///{ready}/mlflow.db" in warning
    parent, children = runs_of(ready)
    assert parent.info.status == "FINISHED"
    assert [run.data.tags["attn_exp.job"] for run in children] == ["a", "c"]


@pytest.mark.parametrize(
    ("given", "look"),
    [
        ({}, "with: attn-exp ui"),
        (
            {"mlflow_experiment": "mine"},
            "with: attn-exp ui mlflow_experiment=mine",
        ),
        ({"uri": "sqlite:////there/x.db"}, "with: attn-exp ui uri=sqlite:////there/x.db"),
        ({"uri": "http://me:secret@host:5000/"}, "at http://host:5000"),
    ],
    ids=str,
)
def test_where_to_look_at_runs_is_told_without_passwords(place: Path, given: dict[str, str], look: str) -> None:
    assert make_tracker({"name": "mlflow", **given}).look() == look
    assert make_tracker({"name": "none"}).look() is None


def test_a_stored_sweep_is_looked_at_by_its_name_or_on_its_page(ready: Path) -> None:
    tracker = make_tracker(config(ready))
    tracker.open(SweepInfo("my sweep", ready / "first", ""))
    assert tracker.close("FINISHED", ()) is None
    assert tracker.look() == f"with: attn-exp ui 'my sweep' uri=sqlite:///{ready}/mlflow.db"


def test_a_blank_in_a_server_s_uri_is_refused_without_showing_it() -> None:
    with pytest.raises(UserError, match="has a blank in it") as error:
        make_tracker({"name": "mlflow", "uri": "http://me:hid den@host:5000"})
    assert "hid" not in str(error.value)


def test_the_command_that_stores_later_says_where_artifacts_go(place: Path) -> None:
    uri = "postgresql://host/db"
    tracker = make_tracker({"name": "mlflow", "uri": uri, "artifacts": "s3://bucket/x"})
    assert "tracker.artifacts=s3://bucket/x" in tracker._replay(SweepInfo("first", place / "first", ""))
    tracker = make_tracker({"name": "mlflow", "uri": uri})
    assert "tracker.artifacts" not in tracker._replay(SweepInfo("first", place / "first", ""))


def test_a_lost_server_is_one_warning_within_seconds(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = make_tracker({"name": "mlflow", "uri": "http://me:secret@127.0.0.1:9", "mlflow_experiment": "x"})
    tracker.open(SweepInfo("first", place / "first", ""))
    for job in range(20):
        tracker.log(a_record(str(job)), place)
    began = time.monotonic()
    warning = tracker.close("FINISHED", ())
    assert time.monotonic() - began < 20
    assert warning is not None
    assert "lacks 20 records" in warning
    assert "secret" not in warning
    assert capfd.readouterr() == ("", "")


def test_closing_with_a_time_limit_returns_in_time_and_still_ends_the_sweep(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    original = LocalArtifactRepository.log_artifacts

    def slow(*given: Any) -> None:
        time.sleep(0.5)
        original(*given)

    monkeypatch.setattr(LocalArtifactRepository, "log_artifacts", slow)
    began = time.monotonic()
    warning = logged(ready, *(a_record(str(number)) for number in range(20)), status="KILLED", timeout_s=3.0)
    assert time.monotonic() - began < 8  # to store all takes more than 10
    assert warning is not None
    assert "no time was left" in warning
    parent, children = runs_of(ready)
    assert parent.info.status == "KILLED"
    assert all(run.info.status == "FINISHED" for run in children)


def test_closing_again_after_an_interrupt_still_ends_the_sweep(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = make_tracker(config(ready))
    tracker.open(SweepInfo("first", ready / "first", ""))
    tracker.log(a_record("a"), ready)
    with monkeypatch.context() as patch:
        patch.setattr(Background, "settle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tracker.close("FINISHED", ())
    assert tracker.close("KILLED", (), timeout_s=10) is None
    parent, children = runs_of(ready)
    assert (parent.info.status, len(children)) == ("KILLED", 1)
    assert tracker.close("FINISHED", ()) is None


def test_a_locked_database_is_a_warning(ready: Path) -> None:
    tracker = make_tracker(config(ready))
    tracker.open(SweepInfo("first", ready / "first", ""))
    tracker.settle()
    with sqlite3.connect(ready / "mlflow.db", isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        tracker.log(a_record("a"), ready)
        warning = tracker.close("KILLED", (), timeout_s=1)
        database.execute("ROLLBACK")
    assert warning is not None
    assert "lacks 1 record (" in warning
    assert str(ready / "first") in warning


def python(code: str, folder: Path) -> "subprocess.Popen[str]":
    head = "import sys, time; from pathlib import Path; from attn_exp.tracking import SweepInfo, make_tracker\n"
    tests, root = Path(__file__).parent, Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": f"{root}:{tests}"}
    for name in client.ENVIRONMENT:
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_opening_is_cheap_and_an_interrupt_does_not_wait_for_the_import(tmp_path: Path) -> None:
    code = """
        tracker = make_tracker({"name": "mlflow"})
        began = time.perf_counter()
        tracker.open(SweepInfo("first", Path("first"), ""))
        opened = time.perf_counter()
        assert "torch" not in sys.modules
        said = tracker.close("KILLED", (), timeout_s=1)
        print(opened - began, time.perf_counter() - opened, said)
    """
    crowded = cli.crowding()
    process = python(code, tmp_path)
    out, err = process.communicate(timeout=60)
    opened, closed, *_ = out.split()
    assert (process.returncode, err) == (0, "")
    crowded = max(crowded, cli.crowding())
    assert float(opened) / crowded < 0.1
    assert float(closed) / crowded < 1.5


def test_nothing_heavy_is_imported_with_the_package(tmp_path: Path) -> None:
    code = "import attn_exp.tracking.mlflow; print([n for n in ('mlflow', 'torch', 'sqlalchemy') if n in sys.modules])"
    assert python(code, tmp_path).communicate(timeout=30) == ("[]\n", "")


def test_eight_processes_open_one_fresh_database_at_once(tmp_path: Path) -> None:
    # Forks, which have imported what takes seconds: they come to the database at the same time. Patient, because what
    # is tested is order, and a machine may be busy for minutes.
    code = """
        import importlib, os, threading, traceback
        from attn_exp.tracking.client import silence
        from test_tracker_mlflow import a_record
        silence()
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
        assert threading.active_count() == 1
        forks = []
        for number in range(8):
            forks.append(os.fork())
            if forks[-1]:
                continue
            try:
                tracker = make_tracker({"name": "mlflow", "patience_s": 3600})
                tracker.open(SweepInfo(f"sweep{number}", Path("multirun"), ""))
                for job in range(3):
                    tracker.log(a_record(f"{number}-{job}"), Path("."))
                os._exit(1 if tracker.close("FINISHED", ()) else 0)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
        print([os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks])
    """
    assert python(code, tmp_path).communicate(timeout=600) == (f"{[0] * 8}\n", "")
    with sqlite3.connect(tmp_path / "mlruns" / "mlflow.db") as database:
        states = dict(database.execute("SELECT status, count(*) FROM runs GROUP BY status"))
    assert states == {"FINISHED": 32}


def test_a_database_of_a_newer_mlflow_is_refused_in_one_sentence(ready: Path) -> None:
    with sqlite3.connect(ready / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    with pytest.raises(
        UserError, match=r"was written by a newer MLflow than the installed .*upgrade mlflow, or choose"
    ):
        make_tracker(config(ready)).open(SweepInfo("first", ready, ""))


def test_a_file_that_is_no_database_is_refused(place: Path) -> None:
    (place / "mlflow.db").write_text("this is no database " * 100)
    with pytest.raises(UserError, match="is not a sqlite database"):
        make_tracker(config(place)).open(SweepInfo("first", place, ""))


def test_a_folder_that_cannot_be_made_or_written_is_refused(place: Path) -> None:
    (place / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        make_tracker(config(place / "file")).open(SweepInfo("first", place, ""))
    # Root may write everywhere else, and is told so here too.
    wanted = r"/proc cannot be written \(.*\): choose another with tracker\.uri"
    with pytest.raises(UserError, match=wanted):
        make_tracker({"name": "mlflow", "uri": "sqlite:////proc/x.db"}).open(SweepInfo("first", place, ""))


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("file:///tmp/mlruns", "is a folder, which MLflow no longer supports"),
        ("mlruns", "is a folder, which MLflow no longer supports"),
        ("sqlite://mlflow.db", "names no database file"),
        ("sqlite:///:memory:", "names no database file"),
        ("sqlite:///a%00b/mlflow.db", r"names a file that cannot be \(%00\)"),
        ("sqlite:///a?b/mlflow.db", r"has a \? in its path, where a URI.s path ends: write %3F"),
        ("ftp://me:secret@host", "tracker.uri=ftp://host is not one of sqlite, http"),
    ],
)
def test_a_location_that_cannot_be_meant_is_refused(place: Path, uri: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_tracker({"name": "mlflow", "uri": uri})


def test_a_relative_database_counts_from_the_folder_one_stands_in(place: Path) -> None:
    assert location.absolute_uri("sqlite:///a/b.db?timeout=3") == f"sqlite:///{place}/a/b.db?timeout=3"
    assert location.absolute_uri("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert location.database_file("sqlite:////a/b.db") == Path("/a/b.db")
    assert location.absolute_uri("postgresql+psycopg2://u:p@h/d") == "postgresql+psycopg2://u:p@h/d"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:p/w@host:5432/db", "postgresql://host:5432/db"),
        ("run uri=https://token@host x=1", "run uri=https://host x=1"),
        ("postgresql://host/db?user=a&password=b&x=1", "postgresql://host/db?user=a&password=***&x=1"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("mysql+pymysql://host/db?user=me&passwd=b", "mysql+pymysql://host/db?user=me&passwd=***"),
        ("mssql://h/d?odbc_connect=DRIVER%3Dx%3BPWD%3Dsecret&x=1", "mssql://h/d?odbc_connect=***&x=1"),
        ("https://a.blob.core.windows.net/c?sv=1&sig=abc%2F", "https://a.blob.core.windows.net/c?sv=1&sig=***"),
        ("uri=wasbs://runs@a.blob.core.windows.net/x y", "uri=wasbs://runs@a.blob.core.windows.net/x y"),
        ("hdfs://me:pw@nn:8020/x", "hdfs://nn:8020/x"),
    ],
)
def test_user_and_password_are_never_shown(uri: str, shown: str) -> None:
    assert redacted(uri) == shown


def test_a_store_that_is_gone_is_not_asked_for_every_job() -> None:
    asked = []

    def fails() -> None:
        asked.append(1)
        raise OSError("gone")

    thread = Background("test")
    for _ in range(10):
        thread.put(fails)
    assert thread.settle(5)
    assert len(asked) == 3
    thread.ask_again()
    thread.put(fails)
    assert thread.settle(5)
    assert len(asked) == 4
    thread.stop()


def test_no_tracker_and_a_typo(tmp_path: Path) -> None:
    tracker = make_tracker({"name": "none"})
    tracker.open(SweepInfo("first", tmp_path, ""))
    tracker.log(a_record(), tmp_path)
    tracker.settle()
    assert tracker.close("FINISHED", ()) is None
    with pytest.raises(UserError, match="did you mean 'mlflow'"):
        make_tracker({"name": "mlfow"})
