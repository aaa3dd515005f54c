"""MLflow's own web pages for this project's runs: its server, and the address of the list to open."""

import contextlib
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

from attn_exp.core.case import HALVES, PASSES
from attn_exp.core.errors import UserError
from attn_exp.core.redaction import redacted
from attn_exp.tracking.client import ENVIRONMENT, quoted, silence
from attn_exp.tracking.database import State, check_database, database_file, prepare_database, uri_of_mlflow
from attn_exp.tracking.location import option_uri
from attn_exp.tracking.page import run_page
from attn_exp.tracking.view import all_sweeps, one_sweep

# A state of MLflow's run list (view.py) is stored as a tag of the experiment, under the key after the dot.
_VIEW_TAG = "mlflow.sharedViewState."
# MLflow opens it in a browser that has not seen these pages before.
_FIRST_VISIT = "on a first visit close MLflow's Assistant: beside it an answer stands below all else of its page"
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


def serve(uri: str, *, host: str, port: int, experiment: str, sweep: str | None, browser: bool = True) -> int:
    """Run MLflow's server until Ctrl-C, with its address in the `browser`; return 0, or 1 if it did not run."""
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
                address, *page = _addresses(base, experiment, sweep)
                answers = [f"its answer: {one}\n{_FIRST_VISIT}" for one in page]
                print("\n".join([address, *answers, "Ctrl-C ends it"]), flush=True)
                if browser:
                    open_browser(address)
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


def _addresses(base: str, experiment: str, sweep: str | None) -> list[str]:
    """Return the address of the experiment's run list, or of a sweep's charts and its own page, in this order.

    It is that of the front page if the experiment does not exist.
    """
    try:
        answer = _asked(base, f"experiments/get-by-name?experiment_name={quote(experiment)}")
        number = answer["experiment"]["experiment_id"]
        run = None if sweep is None else _run_of(base, number, sweep)
        state = all_sweeps() if sweep is None else one_sweep(sweep, _passes(run))
        key = "attn_exp" if sweep is None else "attn_exp_sweep"
        tag = {"experiment_id": number, "key": _VIEW_TAG + key, "value": json.dumps(state, separators=(",", ":"))}
        _asked(base, "experiments/set-experiment-tag", tag)
        # This workflow removes MLflow's pages for language models from the sidebar.
        runs = f"{base}/#/experiments/{number}/runs?workflowType=machine_learning&viewStateShareKey={key}"
        if sweep is None:
            return [runs]
        pages = [] if run is None else [f"{base}/{run_page(number, run['info']['run_id'])}"]
        return [f"{runs}&compareRunsMode=CHART", *pages]
    except (urllib.error.URLError, KeyError):
        return [f"{base}/#/experiments"]


def _run_of(base: str, experiment: str, sweep: str) -> dict[str, Any] | None:
    """Return the newest run of the sweep itself, as the server describes it."""
    wanted = f"tags.`attn_exp.kind` = 'sweep' and tags.`attn_exp.sweep` = {quoted(sweep)}"
    found = _asked(base, "runs/search", {"experiment_ids": [experiment], "filter": wanted, "max_results": 1})
    runs = found.get("runs") or [None]
    return dict(runs[0]) if runs[0] else None


def _passes(run: dict[str, Any] | None) -> list[str]:
    """Return the passes that a sweep measured; forward and backward if its run does not say."""
    metrics = (run or {}).get("data", {}).get("metrics", [])
    seen = {str(metric["key"]).partition("/best_in/")[0] for metric in metrics if "/best_in/" in str(metric["key"])}
    return [name for name in PASSES if name in seen] or list(HALVES)


def _asked(base: str, path: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what MLflow's REST interface answers."""
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(f"{base}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"})
    with _DIRECT.open(request) as answer:
        return dict(json.load(answer))


def open_browser(address: str) -> None:
    """Open the address where a person sits before a screen."""
    screen = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if screen and sys.stdout.isatty():
        import webbrowser

        with contextlib.suppress(webbrowser.Error, OSError):
            webbrowser.open(address)


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
