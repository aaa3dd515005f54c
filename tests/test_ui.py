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
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import make_record

from attn_exp.commands import ui
from attn_exp.core.case import PASSES
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.base import Summary, params, tags
from attn_exp.tracking.ui import open_browser
from attn_exp.tracking.view import ANSWER_COLUMN, all_sweeps, one_sweep

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
    state = all_sweeps()
    assert (state["orderByKey"], state["searchFilter"], state["groupBy"]) == ("attributes.start_time", "", None)
    assert ANSWER_COLUMN in state["selectedColumns"]


def test_one_sweep_is_its_own_run_above_its_jobs_in_a_flat_list_with_charts_of_its_passes() -> None:
    state = one_sweep("it's", ["step"])
    assert state["searchFilter"] == 'tags.`attn_exp.sweep` = "it\'s"'
    # Its own run is the first, and then each case's fastest job; in the order of time MLflow hides jobs below it.
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`list_place`", True)
    assert state["selectedColumns"][0] == "params.`backend`"
    (section,) = state["compareRunSections"]
    charts = {card["metricKey"]: card["type"] for card in state["compareRunCharts"]}
    assert charts["step/speedup"] == charts["step/time_us"] == "BAR" and charts["step/tflops_by_length"] == "LINE"
    assert {card["metricSectionId"] for card in state["compareRunCharts"]} == {section["uuid"]}
    assert len({card["uuid"] for card in state["compareRunCharts"]}) == len(charts)
    # MLflow cuts an experiment's tag here, and half of a state is none.
    assert len(json.dumps(one_sweep("s" * 250, PASSES), separators=(",", ":"))) < 20_000


def test_every_column_is_something_that_a_job_or_a_sweep_has() -> None:
    record = make_record()
    # Of other lengths of queries than of keys, too.
    unequal = replace(record.request, case=replace(record.request.case, kv_len=2 * record.request.case.kv_len))
    there = {f"params.`{name}`" for one in (record.request, unequal) for name in params(one)}
    there |= {f"tags.`{name}`" for name in tags(record)}
    columns = {column for column in all_sweeps()["selectedColumns"] if not column.startswith("metrics.")}
    assert columns - {ANSWER_COLUMN} <= there


@pytest.mark.parametrize(
    ("screen", "terminal", "opened"), [(True, True, 1), (False, True, 0), (True, False, 0)], ids=str
)
def test_a_browser_opens_where_a_person_sits_before_a_screen(
    monkeypatch: pytest.MonkeyPatch, screen: bool, terminal: bool, opened: int
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", asked.append)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if screen:
        monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    open_browser("http://127.0.0.1:5000")
    assert len(asked) == opened


def test_a_real_server_answers_and_ctrl_c_leaves_no_child(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = make_tracker({"name": "mlflow", "uri": uri, "artifacts": str(tmp_path / "artifacts")})
    tracker.open(SweepInfo("first", tmp_path / "first", ""))
    summary = Summary(answer="**cudnn is the fastest**", metrics={"list_place": 0, "forward/best_in/cudnn": 1})
    assert tracker.close("FINISHED", (), summary=summary) is None
    look = tracker.look()
    assert look is not None and look.startswith("with: attn-exp ui first uri=")
    port = a_free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_exp", "ui", "first", f"uri={uri}", f"port={port}"],
        cwd=tmp_path,
        # A proxy, which is not there, has nothing to do with a server on this machine.
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "http_proxy": "http://127.0.0.1:9"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == f"starting MLflow over {uri} ...\n"
        address, page = (process.stdout.readline().strip() for _ in range(2))
        assert "MLflow's Assistant" in process.stdout.readline()
        assert process.stdout.readline() == "Ctrl-C ends it\n"
        found = re.fullmatch(
            rf"http://127.0.0.1:{port}/#/experiments/(\d+)/runs\?([\w=&]*)viewStateShareKey=(\w+)&compareRunsMode=CHART",
            address,
        )
        assert found
        # The page behind the second address, and behind the first row of the first one, is the sweep's with its answer.
        base = f"http://127.0.0.1:{port}"
        number = page.removeprefix(f"its answer: {base}/#/experiments/{found[1]}/runs/")
        assert number.isalnum(), page
        rest = f"{base}/api/2.0/mlflow"
        with urllib.request.urlopen(f"{rest}/runs/get?run_id={number}") as answer:
            run = json.load(answer)["run"]
        notes = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
        assert notes["mlflow.note.content"].startswith("**cudnn is the fastest**")
        state = one_sweep("first", ["forward"])
        wanted = {"experiment_ids": [found[1]], "filter": state["searchFilter"]}
        wanted["order_by"] = [f"{state['orderByKey']} ASC"]
        request = urllib.request.Request(
            f"{rest}/runs/search", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["runs"][0]["info"]["run_id"] == number
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert b"MLflow" in answer.read()
        name = urllib.parse.quote("attn_exp")
        api = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get-by-name?experiment_name={name}"
        with urllib.request.urlopen(api) as answer:
            experiment = json.load(answer)["experiment"]
        kept = {tag["key"]: tag["value"] for tag in experiment["tags"]}
        assert experiment["experiment_id"] == found[1]
        assert json.loads(kept[f"mlflow.sharedViewState.{found[3]}"]) == state
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
