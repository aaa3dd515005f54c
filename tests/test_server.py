"""Sweeps into a real MLflow server over a real PostgreSQL, and replays of their folders."""

import contextlib
import http.server
import importlib
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli
import inprocess
import psycopg
import pytest
import servers
import sweeps

from attn_exp.commands.explain import main as explain_main
from attn_exp.commands.log import main as log_main
from attn_exp.commands.ui import main as ui_main
from attn_exp.core.errors import UserError
from attn_exp.core.record.file import FILE_NAME, write_record
from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.client import silence
from attn_exp.tracking.page import run_page

PLANTED = "planted-9f8e7d6c5b"


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with servers.postgres() as uri:
        yield uri


@pytest.fixture(scope="module")
def server(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.mlflow_server(database, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def client_of(server: servers.Server) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(server.uri)


def runs(server: servers.Server, experiment: str) -> list[Any]:
    client = client_of(server)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id])) if found else []


def kinds(server: servers.Server, experiment: str) -> dict[str, int]:
    """How many runs there are of each kind; all of them have to be finished."""
    found = runs(server, experiment)
    assert {run.info.status for run in found} <= {"FINISHED", "FAILED"}
    names = [run.data.tags["attn_exp.kind"] for run in found]
    return {name: names.count(name) for name in names}


def a_sweep(home: Path, name: str = "first", lengths: tuple[int, ...] = (256, 512)) -> list[Record]:
    records = [sweeps.job(backend, of=sweeps.case(seq_len=n)) for backend in ("flash", "math") for n in lengths]
    sweeps.write(home / "multirun" / name, records)
    return records


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = log_main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_a_replay_twice_is_once_wherever_the_folder_lies_and_names_what_is_broken(
    server: servers.Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(home)
    sweeps.write(home / "multirun" / "second", [sweeps.job()])
    cut = home / "multirun" / "first" / "eager-cut" / FILE_NAME
    cut.parent.mkdir()
    whole = next((home / "multirun" / "first").glob(f"flash-*/{FILE_NAME}")).read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    where = (f"tracker.uri={server.uri}", "tracker.mlflow_experiment=again")
    code, out, err = said(capsys, "first", "second", *where)
    assert (code, out.count(" there already")) == (3, 2)
    assert "first: 4 records, 4 new, 0 there already" in out
    assert "second: 1 record, 1 new, 0 there already" in out
    assert err.startswith(f"skipped: {cut} is not a record")
    there = kinds(server, "again")
    assert (there["sweep"], there["job"], there["curve"]) == (2, 5, 2)
    # A record that changed is stored anew, the rest is not; a moved folder is the same sweep.
    shutil.move(home / "multirun" / "first", home / "elsewhere")
    record = next(read_folder(home / "elsewhere").records())
    write_record(sweeps.replace(record, finished_at=record.finished_at + 5), home / "elsewhere" / record.request.job)
    code, out, _ = said(capsys, "./elsewhere", "second", "tracker=server", *where)
    assert (code, "first: 4 records, 1 new, 3 there already" in out) == (3, True)
    assert kinds(server, "again") == there
    (parent,) = [run for run in runs(server, "again") if run.info.run_name == "first"]
    assert parent.info.start_time == int(sweeps.NOON * 1000)


def test_a_run_of_a_server_is_explained_from_what_the_server_has(
    server: servers.Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(home)
    assert log_main(["first", f"tracker.uri={server.uri}", "tracker.mlflow_experiment=explained"]) == 0
    found = {run.data.tags["attn_exp.kind"]: run.info.run_id for run in runs(server, "explained")}
    shutil.rmtree(home / "multirun")
    capsys.readouterr()
    assert explain_main([found["job"], f"uri={server.uri}"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(("flash: b4 h16", "math: b4 h16"))
    assert "flash_backward" in page and "math_backward" in page, "the job, and its rival on the same case"
    for word, wanted in ((found["sweep"], "is not a job's but of kind sweep"), ("0" * 32, "there is no run 0000")):
        assert explain_main([word, f"uri={server.uri}"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and wanted in err


def test_a_server_has_the_sweep_s_charts_and_ui_prints_their_addresses(
    server: servers.Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(home)
    assert log_main(["first", f"tracker.uri={server.uri}", "tracker.mlflow_experiment=charts"]) == 0
    (parent,) = [run for run in runs(server, "charts") if run.data.tags["attn_exp.kind"] == "sweep"]
    experiment = client_of(server).get_experiment_by_name("charts")
    capsys.readouterr()
    assert ui_main(["first", f"uri={server.uri}", "mlflow_experiment=charts"]) == 0
    charts, page, *_ = capsys.readouterr().out.splitlines()
    list_of_runs = f"{server.uri}/#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning"
    assert charts.startswith(f"{list_of_runs}&viewStateShareKey=attn_exp_")
    assert page == f"its answer: {server.uri}/{run_page(experiment.experiment_id, parent.info.run_id)}"
    key = charts.partition("viewStateShareKey=")[2].partition("&")[0]
    state = json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])
    titles = [card["displayName"][:10] for card in state["compareRunCharts"]]
    assert len(set(titles)) == len(titles) == 10


def tracker_for(uri: str, experiment: str) -> Any:
    return make_tracker({"name": "mlflow", "uri": uri, "mlflow_experiment": experiment})


def logged(tracker: Any, home: Path, records: list[Record]) -> str | None:
    for record in records:
        tracker.log(record, home / "multirun" / "first" / record.request.job)
    tracker.settle()
    return tracker.close("FINISHED")


def test_an_artifact_store_that_takes_no_files_is_told_and_replayed(
    server: servers.Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, records = "not-writable", a_sweep(home)
    tracker = tracker_for(server.uri, name)
    assert tracker.open(SweepInfo("first", home / "multirun" / "first", "")) is None
    with contextlib.ExitStack() as held:
        away = server.artifacts.with_name("away")
        server.artifacts.rename(away)
        server.artifacts.write_text("")
        held.callback(away.rename, server.artifacts)
        held.callback(server.artifacts.unlink)
        warning = logged(tracker, home, records)
    assert warning is not None
    assert "lacks 4 records (its artifact store accepted no files (full or read-only?), see its log: " in warning
    command = warning.partition("store them with: ")[2].split()
    assert command[:3] == ["attn-exp", "log", "first"]
    assert kinds(server, name) == {"sweep": 1}
    code, out, _ = said(capsys, *command[2:])
    assert (code, "4 new" in out) == (0, True)
    assert kinds(server, name)["job"] == 4


def test_a_server_that_is_away_at_the_start_is_told_and_stored_into_when_it_is_back(
    server: servers.Server, home: Path
) -> None:
    records, port = a_sweep(home), servers.free_port()
    tracker = tracker_for(f"http://127.0.0.1:{port}", "late")
    warning = tracker.open(SweepInfo("first", home / "multirun" / "first", ""))
    assert warning is not None
    assert f"MLflow at http://127.0.0.1:{port} stores nothing yet (it cannot be reached: Connection refused)" in warning
    assert f"attn-exp log first uri=http://127.0.0.1:{port} mlflow_experiment=late" in warning
    for record in records:
        tracker.log(record, home / "multirun" / "first" / record.request.job)
    tracker.settle()
    with forwarded(port, int(server.uri.rpartition(":")[2])):
        assert tracker.close("FINISHED") is None
    assert kinds(server, "late") == {"sweep": 1, "job": 4}


def test_a_sweep_whose_server_was_lost_ends_with_the_command_that_stores_it(
    server: servers.Server, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, port = inprocess.typed(monkeypatch, home), servers.free_port()
    # Whichever tests ran before: a busy machine takes longer to import it than a sweep of one job waits.
    silence()
    importlib.import_module("mlflow")
    place = ("tracker=server", f"tracker.uri=http://127.0.0.1:{port}", "tracker.mlflow_experiment=lost")
    code, out, err = typed(*cli.QUICK, "backend=eager", "isolation=none", "sweep=lost", *place)
    # None of its records is stored.
    assert code == 1, err
    assert "stores nothing yet (it cannot be reached: Connection refused): the sweep continues" in out + err
    command = (out + err).rpartition("store them with: ")[2].splitlines()[0].split()
    assert command == ["attn-exp", "log", "lost", *(word.removeprefix("tracker.") for word in place[1:])]
    with forwarded(port, int(server.uri.rpartition(":")[2])):
        code, out, err = said(capsys, *command[2:])
    assert (code, err, "lost: 1 record, 1 new" in out) == (0, "", True)
    assert kinds(server, "lost") == {"sweep": 1, "job": 1}
    (parent,) = [run for run in runs(server, "lost") if run.data.tags["attn_exp.kind"] == "sweep"]
    assert parent.data.tags["attn_exp.command"].startswith("python -m attn_exp device=cpu")


def test_a_replay_into_a_server_that_is_away_says_so_in_one_sentence(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(home)
    code, out, err = said(capsys, "first", f"tracker.uri=http://me:{PLANTED}@127.0.0.1:{servers.free_port()}")
    assert (code, err, out.count("\n")) == (1, "", 1)
    assert "took nothing (it cannot be reached: Connection refused); the same command tries again" in out
    assert PLANTED not in out


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (401, r"refuses this user \(go away\): set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        (404, r"is not an MLflow server: use tracker\.uri=http://HOST:5000"),
    ],
)
def test_a_server_that_refuses_is_the_user_s_mistake_before_anything_is_measured(
    home: Path, status: int, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(home)
    with imitation(status) as port:
        uri = f"http://me:{PLANTED}@127.0.0.1:{port}"
        with pytest.raises(UserError, match=wanted) as refused:
            tracker_for(uri, "x").open(SweepInfo("first", home / "multirun" / "first", ""))
        assert PLANTED not in str(refused.value)
        code, out, err = said(capsys, "first", f"tracker.uri={uri}")
    assert (code, out) == (2, "")
    assert PLANTED not in err
    assert "tracker.uri=" not in err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["frist"], "there is no sweep 'frist': did you mean 'first'?"),
        (["first", "tracker=none"], "stores nothing: choose tracker=mlflow or tracker=server"),
        (["first", "--uri"], "uri= needs a value: write uri=VALUE"),
        (["first", "--urli=x"], "there is no option 'urli=': did you mean 'uri'?"),
        (["tracker=server"], "no SWEEP was given: write one, for example attn-exp log first"),
        (["empty"], "has no records"),
    ],
)
def test_a_mistake_is_one_sentence(
    home: Path, words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a_sweep(home)
    (home / "multirun" / "empty").mkdir()
    code, out, err = said(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert wanted in err
    assert PLANTED not in err


def test_no_secret_reaches_a_file_a_line_or_mlflow(server: servers.Server, database: str, tmp_path: Path) -> None:
    secrets = {
        "MLFLOW_TRACKING_PASSWORD": f"{PLANTED}-password", "MLFLOW_TRACKING_USERNAME": "me",
        "AWS_SECRET_ACCESS_KEY": f"{PLANTED}-aws", "HF_TOKEN": f"{PLANTED}-hf", "MY_NOTE": "passed by name",
        "CUDA_API_KEY": f"{PLANTED}-cuda", "ATTN_EXP_TOKEN": f"{PLANTED}-own",
    }  # fmt: skip
    command = [
        *(sys.executable, "-m", "attn_exp", "-m", "backend._target_=teller.Teller", *cli.QUICK, "batch=1,2"),
        *("tracker=server", f"tracker.uri={server.uri.replace('//', f'//me:{PLANTED}-typed@')}"),
        *("tracker.mlflow_experiment=secrets", "sweep=told", "isolation.variables=[MY_NOTE]", "save_plots=false"),
    ]
    environment = cli.environment() | secrets
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr
    records = list(read_folder(tmp_path / "multirun" / "told").records())
    assert [record.status for record in records] == ["ok", "ok"]
    for log in (tmp_path / "multirun" / "told").glob("*/worker.log"):
        told = [line.removeprefix("told ").partition("=")[0] for line in log.read_text().splitlines()]
        assert {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", "MY_NOTE"} <= set(told)
        assert not set(secrets).intersection(told) - {"MY_NOTE"}
        assert not any(name.startswith("MLFLOW") for name in told)
    assert PLANTED not in ran.stdout + ran.stderr
    files = [path for folder in (tmp_path, server.artifacts.parent) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 15
    assert [path for path in files if PLANTED.encode() in path.read_bytes()] == []
    assert kinds(server, "secrets") == {"sweep": 1, "job": 2}
    assert PLANTED not in every_value(database)
    # A secret that is typed into what a record keeps is refused, and not said again.
    typed = [*command[:5], "+backend.token=${oc.env:HF_TOKEN}", "tracker=none"]
    ran = subprocess.run(typed, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "backend.token holds the value of the variable HF_TOKEN" in ran.stderr
    assert PLANTED not in ran.stderr


def every_value(database: str) -> str:
    """All that MLflow's database holds, as one text."""
    with psycopg.connect(database) as connection:
        tables = connection.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'")
        names = [row[0] for row in tables.fetchall()]
        assert {"runs", "params", "tags", "metrics", "experiments"} <= set(names)
        return "\n".join(str(row) for name in names for row in connection.execute(f'SELECT * FROM "{name}"').fetchall())


@contextlib.contextmanager
def imitation(status: int) -> Iterator[int]:
    """A web server that is no MLflow; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"go away\n")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found.server_address[1]
        found.shutdown()


@contextlib.contextmanager
def forwarded(port: int, target: int) -> Iterator[None]:
    """Whoever asks on one port of loopback is answered from another."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", target))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
