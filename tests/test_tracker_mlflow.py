"""MLflow's tracker against real MLflow on sqlite, in a folder of the test's own."""

import importlib.util
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from attn_exp.commands.log import main as log_main
from attn_exp.core.case.case import Case
from attn_exp.core.errors import UserError
from attn_exp.core.record.file import write_record
from attn_exp.core.record.profile import Profile
from attn_exp.core.record.record import Kernel, PassRecord, Record, Timing
from attn_exp.core.record.request import Measuring, Request
from attn_exp.core.record.status import Status
from attn_exp.core.redaction import redacted
from attn_exp.tracking import SweepInfo, client, make_tracker, runs
from attn_exp.tracking.background import Background
from attn_exp.tracking.base import EndStatus, Summary
from attn_exp.tracking.client import NewRun, store_run
from attn_exp.tracking.database import prepare_database
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
    path = tmp_path_factory.mktemp("migrated") / "mlflow.db"
    prepare_database(path)
    return path


@pytest.fixture
def ready(place: Path, migrated: Path) -> Path:
    shutil.copyfile(migrated, place / "mlflow.db")
    return place


def config(folder: Path) -> dict[str, Any]:
    return {
        "name": "mlflow", "uri": f"sqlite:///{folder}/mlflow.db", "artifacts": str(folder / "artifacts"),
        "mlflow_experiment": "attn_exp",
    }  # fmt: skip


def logged(
    place: Path, *records: Record, sweep: str = "first", status: EndStatus = "FINISHED", **summary: Any
) -> str | None:
    (place / sweep).mkdir(exist_ok=True)
    tracker = make_tracker(config(place))
    tracker.open(SweepInfo(sweep, place / sweep, "python -m attn_exp tracker.uri=http://me:secret@host:5000"))
    for record in records:
        folder = place / sweep / record.request.job
        folder.mkdir(parents=True, exist_ok=True)
        write_record(record, folder)
        tracker.log(record, folder)
    return tracker.close(status, Summary(**summary))


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
    assert logged(place, *records, files=[table, place / "absent"]) is None
    parent, children = runs_of(place)
    assert (parent.info.run_name, parent.info.status, artifacts_of(parent)) == ("first", "FINISHED", {"table.csv"})
    assert parent.data.tags["attn_exp.command"] == "python -m attn_exp tracker.uri=http://host:5000"
    assert [run.info.status for run in children] == ["FINISHED", "FINISHED", "FAILED"]
    assert [run.data.tags["attn_exp.status"] for run in children] == ["ok", "unsupported", "crashed"]
    assert [run.data.tags.get("attn_exp.reason") for run in children] == [None, "because", "because"]
    run = children[0]
    assert run.info.run_name == "flash s1024 b8 causal h16 d128 bf16 (first)"
    assert (run.info.start_time, run.info.end_time) == (1_700_000_000_000, 1_700_000_002_500)
    assert run.data.metrics["forward/time_us"] == 2.5 and run.data.metrics["case/seq_len"] == 1024
    wanted = {
        "batch": "8", "seq_len": "1024", "causal": "True", "backend": "flash", "backend.tiles.rows": "64",
        "model": "gpt2", "device": "cpu", "timer": "cpu", "passes": "forward+backward", "seed": "123",
        "stopping.precision": "0.005",
    }  # fmt: skip
    assert wanted.items() <= run.data.params.items()
    assert run.data.tags["attn_exp.flags"] == "drift (forward), unstable"
    assert run.data.tags[NOTE] == (
        f"forward: **2.5 us**  \n[the sweep's answer]"
        f"(#/experiments/{run.info.experiment_id}/runs/{parent.info.run_id}?workflowType=machine_learning)"
    )
    assert children[1].data.tags[NOTE].startswith("**unsupported: because**  \n[the sweep's answer](")
    # The name has the case, a parameter the backend.
    assert not {"attn_exp.label", "attn_exp.shape"} & run.data.tags.keys()
    assert run.data.tags["attn_exp.gpu"] == "A CPU"
    assert len(run.data.tags["attn_exp.kernel_forward"]) == 250
    assert artifacts_of(run) == {"record.json"}
    assert {path.name for path in (place / "first" / "a").iterdir()} == {"record.json"}


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


def test_a_sweep_that_lost_its_identity_is_known_by_its_jobs(ready: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logged(ready, a_record("a", metrics=TIMES), a_record("b", metrics=TIMES)) is None
    before = runs_of(ready)
    (ready / "first" / "sweep.id").unlink()
    # One that is not stored yet comes first.
    new = a_record("0", metrics=TIMES)
    (ready / "first" / new.request.job).mkdir()
    write_record(new, ready / "first" / new.request.job)
    place = [f"tracker.{key}={value}" for key, value in config(ready).items() if key in ("uri", "artifacts")]
    assert log_main(["./first", *place]) == 0, capsys.readouterr()
    after = runs_of(ready)
    assert after[0].info.run_id == before[0].info.run_id and len(after[1]) == 3
    assert {run.info.run_id for run in before[1]} < {run.info.run_id for run in after[1]}


def test_a_killed_process_leaves_no_job_running_and_its_sweep_is_taken_up(ready: Path) -> None:
    (ready / "first").mkdir()
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
        assert tracker.close("FINISHED") is None
    with sqlite3.connect(ready / "mlflow.db") as database:
        rows = database.execute("SELECT count(*) FROM tags WHERE key = 'mlflow.parentRunId'").fetchone()
        live = database.execute("SELECT count(*) FROM runs WHERE lifecycle_stage = 'active'").fetchone()
    assert (rows[0], live[0]) == (2, 4)


def test_one_job_that_cannot_be_stored_is_a_warning_and_the_others_are_stored(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(client: Any, experiment: str, new: NewRun) -> str:
        if new.tags["attn_exp.job"] == "b":
            raise OSError("disk full at http://me:secret@host\nand more")
        return store_run(client, experiment, new)

    monkeypatch.setattr(runs, "store_run", failing)
    warning = logged(ready, a_record("a"), a_record("b"), a_record("c"))
    assert warning is not None
    assert "lacks 1 record (disk full at http://host)" in warning
    assert f"store them with: attn-exp log ./first uri=sqlite:///{ready}/mlflow.db" in warning
    parent, children = runs_of(ready)
    assert parent.info.status == "FINISHED"
    assert [run.data.tags["attn_exp.job"] for run in children] == ["a", "c"]


def test_nothing_is_kept_of_a_run_that_cannot_be_stored_wholly(ready: Path) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    logged(ready)
    mlflow_client = MlflowClient(f"sqlite:///{ready}/mlflow.db")
    experiment = runs_of(ready)[0].info.experiment_id
    with sqlite3.connect(ready / "mlflow.db") as database:
        count = "SELECT count(*) FROM runs WHERE lifecycle_stage = 'active'"
        before = database.execute(count).fetchone()
        metrics = [Metric("..", 1.0, 1, 0)]
        with pytest.raises(MlflowException):
            store_run(
                mlflow_client,
                experiment,
                NewRun(name="a", parent="p", moments=(1.0, 2.0), tags={}, params={}, metrics=metrics),
            )
        assert database.execute(count).fetchone() == before


@pytest.mark.parametrize(
    ("given", "look"),
    [
        ({}, "with: attn-exp ui"),
        ({"mlflow_experiment": "mine"}, "with: attn-exp ui mlflow_experiment=mine"),
        ({"uri": "sqlite:////there/x.db"}, "with: attn-exp ui uri=sqlite:////there/x.db"),
        ({"uri": "http://me:secret@host:5000/"}, "at http://host:5000/"),
    ],
    ids=str,
)
def test_the_address_of_runs_is_told_without_passwords(place: Path, given: dict[str, str], look: str) -> None:
    assert make_tracker({"name": "mlflow", **given}).look() == look
    assert make_tracker({"name": "none"}).look() is None


def test_a_stored_sweep_is_looked_at_by_its_name_or_on_its_page(ready: Path) -> None:
    tracker = make_tracker(config(ready))
    tracker.open(SweepInfo("my sweep", ready / "first", ""))
    assert tracker.close("FINISHED") is None
    assert tracker.look() == f"with: attn-exp ui 'my sweep' uri=sqlite:///{ready}/mlflow.db"


def test_a_database_that_was_deleted_meanwhile_is_missed(ready: Path) -> None:
    tracker = make_tracker(config(ready))
    tracker.open(SweepInfo("first", ready / "first", ""))
    tracker.log(a_record("a"), ready)
    tracker.settle()
    (ready / "mlflow.db").unlink()
    tracker.log(a_record("b"), ready)
    said = tracker.close("FINISHED")
    assert said is not None and "lacks records (its file was moved or deleted)" in said and tracker.lacks


def test_closing_again_after_an_interrupt_still_ends_the_sweep(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = make_tracker(config(ready))
    tracker.open(SweepInfo("first", ready / "first", ""))
    tracker.log(a_record("a"), ready)
    with monkeypatch.context() as patch:
        patch.setattr(Background, "settle", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tracker.close("FINISHED")
    assert tracker.close("KILLED", timeout_s=10) is None
    parent, children = runs_of(ready)
    assert (parent.info.status, len(children)) == ("KILLED", 1)
    assert tracker.close("FINISHED") is None


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("file:///tmp/mlruns", "is a folder, which MLflow no longer supports.*mlflow migrate-filestore"),
        ("sqlite://mlflow.db", "names no database file"),
        ("sqlite:///:memory:", "names no database file"),
        ("sqlite:///a?b/mlflow.db", "because of a %, # or . in it: use another folder"),
        ("sqlite:///a%20b/mlflow.db", "because of a %, # or . in it: use another folder"),
        ("ftp://me:secret@host", "tracker.uri=ftp://host is not one of sqlite, http"),
    ],
)
def test_a_location_that_cannot_be_meant_is_refused(place: Path, uri: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_tracker({"name": "mlflow", "uri": uri})


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:p/w@host:5432/db", "postgresql://host:5432/db"),
        ("run uri=https://token@host x=1", "run uri=https://host x=1"),
        ("postgresql://host/db?user=a&password=b&x=1", "postgresql://host/db?user=a&password=***&x=1"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("https://a.blob.core.windows.net/c?sv=1&sig=abc%2F", "https://a.blob.core.windows.net/c?sv=1&sig=***"),
    ],
)
def test_user_and_password_are_never_shown(uri: str, shown: str) -> None:
    assert redacted(uri) == shown
