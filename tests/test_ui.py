"""The command that starts MLflow's pages: its mistakes told in one sentence, and one real server started and ended."""

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import cli
import pytest

from attn_exp.commands import ui
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.base import Summary
from attn_exp.tracking.view import one_sweep

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")


def a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with the sweep `first`, which takes seconds to make."""
    folder = tmp_path_factory.mktemp("store")
    tracker = make_tracker({"name": "mlflow", "uri": f"sqlite:///{folder}/mlflow.db", "artifacts": str(folder / "a")})
    tracker.open(SweepInfo("first", folder / "first", ""))
    summary = Summary(answer="**cudnn is the fastest**", metrics={"list_place": 0}, params={"passes": "forward"})
    assert tracker.close("FINISHED", summary=summary) is None
    look = tracker.look()
    assert look is not None and look.startswith("with: attn-exp ui first uri=")
    return f"sqlite:///{folder}/mlflow.db"


def test_a_port_in_use_names_a_free_one(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ui.main([f"uri={uri}", f"port={port}"]) == 2
    found = re.fullmatch(
        rf"attn-exp ui: port {port} on 127.0.0.1 cannot be used: try port=(\d+)\n", capsys.readouterr().err
    )
    assert found
    assert int(found[1]) != port


def test_the_address_of_another_machine_is_one_sentence(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.main([f"uri={uri}", "host=192.0.2.1"]) == 2
    assert capsys.readouterr().err.startswith("attn-exp ui: host=192.0.2.1 is no address of this machine: ")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["frist"], "there is no sweep 'frist' in that store: did you mean 'first'? the sweeps are first"),
        (["first", "mlflow_experiment=other"], "there is no experiment 'other' in that store: "),
    ],
)
def test_a_sweep_that_is_not_there_is_one_sentence(
    uri: str, capsys: pytest.CaptureFixture[str], flags: list[str], wanted: str
) -> None:
    assert ui.main([f"uri={uri}", f"port={a_free_port()}", *flags]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"attn-exp ui: {wanted}")
    assert said.err.endswith("; type attn-exp ui NAME\n" if len(flags) == 1 else "; type mlflow_experiment=NAME\n")


def test_a_real_server_answers_and_ctrl_c_leaves_no_child(uri: str, tmp_path: Path) -> None:
    port = a_free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_exp", "ui", "first", f"uri={uri}", f"port={port}"],
        cwd=tmp_path,
        # A proxy, which is not there, has nothing to do with a server on this machine.
        env=cli.environment() | {"ATTN_EXP_TEST": str(tmp_path), "http_proxy": "http://127.0.0.1:9"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == f"starting MLflow over {uri} ...\n"
        address, page = (process.stdout.readline().strip() for _ in range(2))
        assert process.stdout.readline() == "Ctrl-C ends it\n"
        found = re.fullmatch(
            rf"http://127.0.0.1:{port}/#/experiments/(\d+)/runs\?([\w=&]*)viewStateShareKey=(\w+)&compareRunsMode=CHART",
            address,
        )
        assert found
        # The page behind the second address, and behind the first row of the first one, is the sweep's with its answer.
        base = f"http://127.0.0.1:{port}"
        number = page.removeprefix(f"its answer: {base}/#/experiments/{found[1]}/runs/").partition("?")[0]
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
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(240)
    assert (code, process.stderr.read()) == (0, "")
    cli.wait_for(lambda: not cli.left_behind(tmp_path))
