"""MLflow's own web pages for this project's runs: its server, and the address of the list to open."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from types import FrameType
from typing import Any
from urllib.parse import quote, urlsplit

from attn_exp.core.case import HALVES
from attn_exp.core.errors import UserError
from attn_exp.core.redaction import redacted
from attn_exp.tracking.client import ENVIRONMENT, silence
from attn_exp.tracking.database import State, check_database, database_file, prepare_database, uri_of_mlflow
from attn_exp.tracking.location import option_uri

# A state of MLflow's run list that an address can name: stored as a tag of the experiment, under the key after the dot.
_VIEW_TAG = "mlflow.sharedViewState."
# Columns in addition to those that MLflow always shows. The name has backend and case, so the outcome comes first.
# Widths in pixels: a window 1,400 wide shows everything up to the passes' metrics.
_NAME_COLUMN, _NAME_WIDTH = "attributes.`Run Name`", 310
_COLUMNS = {
    "tags.`attn_exp.status`": 110,
    **{f"metrics.`{side}/{name}`": 125 for side in HALVES for name in ("time_us", "tflops")},
    "tags.`attn_exp.flags`": 200,
    **{f"params.`{name}`": 90 for name in ("backend", "batch", "q_len", "kv_len", "head_dim", "dtype", "causal")},
    "tags.`attn_exp.gpu`": 150,
}
# The charts to show first, of some 60 metrics: a regular expression for their names.
_CHARTS = "/(time_us|tflops)(_by_length)?$"
_START_LIMIT_S, _STOP_LIMIT_S, _POLL_S = 90.0, 5.0, 0.2
# The server is on this machine: a proxy of the environment cannot reach it.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def checked(uri: str, host: str, port: int) -> str:
    """Return the absolute URI of an existing database that the installed MLflow can show on a free port.

    Raises:
        UserError: MLflow is not installed, the database is missing or newer, the URI is a server's, or the port is in
            use.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise UserError("MLflow is not installed: pip install mlflow")
    if urlsplit(uri).scheme in ("http", "https"):
        raise UserError(f"{redacted(uri)} is a server: open it in a browser")
    uri = option_uri(uri)
    path = database_file(uri)
    if path is not None:
        if not path.exists():
            raise UserError(
                f"there is no database {path} yet: measure something with python -m attn_exp, or store a sweep that "
                "you have: attn-exp log NAME"
            )
        if check_database(path) in (State.OLDER, State.HALF_MADE):
            silence()
            print(prepare_database(uri), file=sys.stderr)
    if not _is_free(host, port):
        raise UserError(f"port {port} on {host} cannot be used: try port={_free_port(host)}")
    return uri


def view_state(sweep: str | None) -> dict[str, Any]:
    """Return the state of MLflow's run list: sweeps, newest first, with their jobs; or one sweep's jobs.

    MLflow nests jobs below their sweep only if the list is sorted by time; otherwise the list is flat.
    """
    state: dict[str, Any] = {
        "selectedColumns": list(_COLUMNS),
        "columnOrder": [_NAME_COLUMN, *_COLUMNS],
        "columnWidths": {_NAME_COLUMN: _NAME_WIDTH, **_COLUMNS},
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "searchFilter": "",
        "groupBy": None,
        "runsHiddenMode": "SHOW_ALL",
        "chartsSearchFilter": _CHARTS,
    }
    if sweep is not None:
        mark = '"' if "'" in sweep else "'"
        jobs = f"tags.`attn_exp.kind` = 'job' and tags.`attn_exp.sweep` = {mark}{sweep}{mark}"
        state |= {"orderByKey": "metrics.`forward/time_us`", "orderByAsc": True, "searchFilter": jobs}
    return state


def serve(uri: str, *, host: str, port: int, experiment: str, sweep: str | None) -> int:
    """Run MLflow's server until Ctrl-C; return 0, or 1 if it did not run."""
    # The URI is passed by the environment, because all users can see command lines. One worker without job execution
    # takes a quarter of the memory and starts in seconds.
    command = [sys.executable, "-m", "mlflow", "server", "--workers=1", f"--host={host}", f"--port={port}"]
    own = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if (path := database_file(uri)) is not None:
        command.append(f"--default-artifact-root={path.parent / 'artifacts'}")
        own["MLFLOW_BACKEND_STORE_URI"] = uri_of_mlflow(uri)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    base = f"http://{_reached(host)}:{port}"
    print(f"starting MLflow over {redacted(uri)} ...", flush=True)
    with tempfile.TemporaryFile("w+") as log:
        # In a session of its own: Ctrl-C reaches only this process, and one signal to the group ends all of the
        # server's processes.
        server = subprocess.Popen(
            command, env=ENVIRONMENT | os.environ | own, stdout=log, stderr=log, start_new_session=True
        )
        try:
            if _answers(base, server):
                print(f"{_address(base, experiment, sweep)}\nCtrl-C ends it", flush=True)
                server.wait()
            log.seek(0)
            last = (log.read().strip().splitlines() or ["it printed nothing"])[-1]
            print(f"MLflow's server ended or did not answer: {redacted(last)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 0
        finally:
            _end(server)


def _answers(base: str, server: "subprocess.Popen[bytes]") -> bool:
    limit = time.monotonic() + _START_LIMIT_S
    while server.poll() is None and time.monotonic() < limit:
        try:
            with _DIRECT.open(f"{base}/health", timeout=_STOP_LIMIT_S):
                return True
        except OSError:
            time.sleep(_POLL_S)
    return False


def _address(base: str, experiment: str, sweep: str | None) -> str:
    """Return the address of the experiment's run list in the given state, or the front page if it does not exist."""
    api = f"{base}/api/2.0/mlflow/experiments"
    key = "attn_exp" if sweep is None else "attn_exp_sweep"
    try:
        with _DIRECT.open(f"{api}/get-by-name?experiment_name={quote(experiment)}") as answer:
            number = json.load(answer)["experiment"]["experiment_id"]
        tag = {"experiment_id": number, "key": _VIEW_TAG + key, "value": json.dumps(view_state(sweep))}
        request = urllib.request.Request(
            f"{api}/set-experiment-tag", json.dumps(tag).encode(), {"Content-Type": "application/json"}
        )
        with _DIRECT.open(request):
            # This workflow removes MLflow's pages for language models from the sidebar.
            return f"{base}/#/experiments/{number}/runs?workflowType=machine_learning&viewStateShareKey={key}"
    except (urllib.error.URLError, KeyError):
        return f"{base}/#/experiments"


def _end(server: "subprocess.Popen[bytes]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(_STOP_LIMIT_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _reached(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError):
        return False
    return True


def _free_port(host: str) -> int:
    for port in range(5001, 5100):
        if _is_free(host, port):
            return port
    return 0
