"""The command that starts MLflow's pages: its mistakes told in one sentence, and one real server started and ended."""

import importlib.util
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from fakes import make_record

from attn_exp.commands import ui
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.base import params, tags
from attn_exp.tracking.ui import view_state

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")


def a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_of(leader: int) -> set[int]:
    """The processes that are children of `leader`, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int] = set()
    while grown := {child for child, parent in parents.items() if parent in found | {leader}} - found:
        found |= grown
    return found


def test_help_says_what_it_does_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.main(["--help"]) == 0
    assert "attn-exp ui first port=5001" in capsys.readouterr().out


def test_no_database_yet_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ui.main([]) == 2
    said = capsys.readouterr().err
    wanted = f"there is no database {tmp_path}/mlruns/mlflow.db yet: measure something with python -m attn_exp"
    assert said == f"attn-exp ui: {wanted}, or store a sweep that you have: attn-exp log NAME\n"
    assert not (tmp_path / "mlruns").exists()


def test_a_server_needs_no_second_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.main(["uri=http://me:secret@host:5000"]) == 2
    assert capsys.readouterr().err == "attn-exp ui: http://host:5000 is a server: open it in a browser\n"


def test_a_port_in_use_names_a_free_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sqlite3.connect(tmp_path / "mlflow.db").close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ui.main([f"uri=sqlite:///{tmp_path}/mlflow.db", f"port={port}"]) == 2
    found = re.fullmatch(
        rf"attn-exp ui: port {port} on 127.0.0.1 cannot be used: try port=(\d+)\n", capsys.readouterr().err
    )
    assert found
    assert int(found[1]) != port


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (
            ["frist"],
            "there is no sweep 'frist' in that store: did you mean 'first'? the sweeps are first",
        ),
        (["first", "mlflow_experiment=other"], "there is no experiment 'other' in that store: "),
    ],
)
def test_a_sweep_that_is_not_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], wanted: str
) -> None:
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config

    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.executescript(
            """CREATE TABLE experiments (experiment_id, name); INSERT INTO experiments VALUES (1, 'attn_exp');
            CREATE TABLE runs (run_uuid, experiment_id, lifecycle_stage); INSERT INTO runs VALUES ('a', 1, 'active');
            CREATE TABLE tags (key, value, run_uuid); INSERT INTO tags VALUES ('attn_exp.sweep', 'first', 'a');
            CREATE TABLE alembic_version (version_num);"""
        )
        (newest,) = ScriptDirectory.from_config(_get_alembic_config("")).get_heads()
        database.execute("INSERT INTO alembic_version VALUES (?)", (newest,))
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert ui.main([f"uri={uri}", f"port={a_free_port()}", *flags]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"attn-exp ui: {wanted}")
    assert said.err.endswith("; type attn-exp ui NAME\n" if len(flags) == 1 else "; type mlflow_experiment=NAME\n")


def test_all_sweeps_are_listed_in_the_one_order_in_which_mlflow_nests_jobs() -> None:
    state = view_state(None)
    assert (state["orderByKey"], state["searchFilter"], state["groupBy"]) == ("attributes.start_time", "", None)


def test_the_list_of_one_sweep_has_its_jobs_alone_and_is_flat() -> None:
    state = view_state("it's")
    assert state["searchFilter"] == "tags.`attn_exp.kind` = 'job' and tags.`attn_exp.sweep` = \"it's\""
    assert state["orderByKey"] != "attributes.start_time"


def test_every_column_is_something_that_a_job_has() -> None:
    record = make_record()
    there = {f"params.`{name}`" for name in params(record.request)} | {f"tags.`{name}`" for name in tags(record)}
    columns = {column for column in view_state(None)["selectedColumns"] if not column.startswith("metrics.")}
    assert columns <= there


def test_a_real_server_answers_and_ctrl_c_leaves_no_child(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = make_tracker({"name": "mlflow", "uri": uri, "artifacts": str(tmp_path / "artifacts")})
    tracker.open(SweepInfo("first", tmp_path / "first", ""))
    assert tracker.close("FINISHED", ()) is None
    port = a_free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_exp", "ui", "first", f"uri={uri}", f"port={port}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == f"starting MLflow over {uri} ...\n"
        address = process.stdout.readline().strip()
        assert process.stdout.readline() == "Ctrl-C ends it\n"
        found = re.fullmatch(
            rf"http://127.0.0.1:{port}/#/experiments/(\d+)/runs\?([\w=&]*)viewStateShareKey=(\w+)", address
        )
        assert found
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert b"MLflow" in answer.read()
        name = urllib.parse.quote("attn_exp")
        api = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get-by-name?experiment_name={name}"
        with urllib.request.urlopen(api) as answer:
            experiment = json.load(answer)["experiment"]
        kept = {tag["key"]: tag["value"] for tag in experiment["tags"]}
        assert experiment["experiment_id"] == found[1]
        assert json.loads(kept[f"mlflow.sharedViewState.{found[3]}"]) == view_state("first")
        children = group_of(process.pid)
        assert children
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert (code, process.stderr.read()) == (0, "")
    limit = time.monotonic() + 20
    while alive := {child for child in children if Path(f"/proc/{child}").exists()}:
        assert time.monotonic() < limit, alive
        time.sleep(0.1)
