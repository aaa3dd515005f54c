"""Reading from an MLflow store: the records that the tracker put there, by sqlite itself and by MLflow's client."""

import importlib.util
import shutil
import sqlite3

import pytest
import sweeps

from attn_exp import compare, load
from attn_exp.commands.explain import main as explain_main
from attn_exp.core.errors import UserError
from attn_exp.results.result import Result
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.mlflow_read import read_store

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A folder with two sweeps, stored by the tracker: mlflow.db, artifacts, and the sweeps' own folders."""
    root = tmp_path_factory.mktemp("store")
    for name, us in (("first", 100.0), ("second", 120.0)):
        folder = root / "multirun" / name
        records = [sweeps.job("flash", us), sweeps.job("cudnn", 80.0), sweeps.failed(backend="math")]
        sweeps.write(folder, records)
        tracker = make_tracker(
            {"name": "mlflow", "uri": f"sqlite:///{root}/mlflow.db", "artifacts": str(root / "artifacts")}
        )
        tracker.open(SweepInfo(name, folder, "python -m attn_exp"))
        for record in load(folder).results:
            tracker.log(record.record(), record.path.parent)
        assert tracker.close("FINISHED") is None
    return root


def uri(store):
    return f"sqlite:///{store}/mlflow.db"


def without_path(result: Result):
    return {name: getattr(result, name) for name in Result.__slots__ if name != "path"}


def test_a_store_has_what_the_folders_have(store):
    for name in ("first", "second"):
        stored, own = load(name, uri=uri(store)), load(store / "multirun" / name)
        assert sorted(map(str, map(without_path, stored.results))) == sorted(map(str, map(without_path, own.results)))
        assert stored.broken == ()
        assert stored.results[0].record().request.job == stored.results[0].job


def test_sweeps_of_a_store_are_compared(store):
    found = compare("second", "first", uri=uri(store), metric="forward/time_us")
    assert {row.cell.result.label: row.verdict for row in found.rows} == {
        "flash": "slower",
        "cudnn": "equivalent",
        "math": "failed",
    }


def test_a_project_that_was_moved_is_still_read(store, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(store, moved)
    hidden = store.with_name("hidden")
    store.rename(hidden)
    try:
        assert len(load("first", uri=uri(moved)).results) == 3
    finally:
        hidden.rename(store)


def test_records_that_are_missing_are_named(store, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    with sqlite3.connect(copy / "mlflow.db") as database:
        database.execute("UPDATE runs SET artifact_uri = REPLACE(artifact_uri, ?, ?)", (str(store), str(copy)))
    gone = next(iter((copy / "artifacts").rglob("record.json")))
    gone.unlink()
    (first,) = [load(name, uri=uri(copy)) for name in ("first", "second") if load(name, uri=uri(copy)).broken]
    assert first.broken == (f"{gone} does not exist",)
    assert len(first.results) == 2


def test_deleted_runs_do_not_count(store, tmp_path):
    shutil.copy(store / "mlflow.db", tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("UPDATE runs SET lifecycle_stage = 'deleted' WHERE name LIKE 'flash%'")
    assert {result.label for result in load("first", uri=uri(tmp_path)).results} == {"cudnn", "math"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"uri": "sqlite:///nowhere/mlflow.db"}, "there is no database"),
        ({"uri": "mlruns"}, "uri=mlruns is a folder, which MLflow no longer supports"),
        (
            {"uri": "http://user:secret@localhost:1"},
            "MLflow at http://localhost:1: it cannot be reached: Connection refused",
        ),
    ],
)
def test_mistakes_are_sentences(store, monkeypatch, changes, words):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    given = {"uri": uri(store), "experiment": "attn_exp", "names": ["first"]} | changes
    with pytest.raises(UserError, match=words) as caught:
        read_store(given["uri"], given["experiment"], given["names"])
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_explain_reads_a_sweep_from_the_store(store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert explain_main(["first", f"uri={uri(store)}"]) == 0
    assert "sweep first: 3 jobs on one case" in capsys.readouterr().out
    assert explain_main(["frist", f"uri={uri(store)}"]) == 2
    assert "did you mean 'first'?" in capsys.readouterr().err
    assert explain_main(["first/flash", f"uri={uri(store)}"]) == 2
    assert f"a job is named by its MLflow run: attn-exp explain RUN uri={uri(store)}" in capsys.readouterr().err
