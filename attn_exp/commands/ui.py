"""`attn-exp ui`: MLflow's own pages over the runs of this project."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from attn_exp.commands.options import DEFAULT_STORE, Command
from attn_exp.core.errors import UserError
from attn_exp.core.options import Options, option
from attn_exp.core.redaction import redacted
from attn_exp.core.values import port
from attn_exp.tracking.client import ENVIRONMENT
from attn_exp.tracking.database import check_database, database_file
from attn_exp.tracking.location import is_server, option_uri

_START_LIMIT_S, _STOP_LIMIT_S, _POLL_S = 90.0, 5.0, 0.2


@dataclass(frozen=True, kw_only=True)
class UiOptions(Options):
    """Starts the MLflow UI on this project's database, which plain `mlflow ui` would not find.

    A tracking server runs already. Prints the address of a list that has each sweep with its answer, and its jobs under
    it (click its +); or of one sweep's charts, in its backends' colours, and of its own page, which begins with its
    answer. Ctrl-C ends it.
    """

    sweep: str | None = option("the sweep to open; all sweeps without it", "SWEEP", example="attn-exp ui first")
    uri: str | None = option("the database or the tracking server to show", "URI", shown=DEFAULT_STORE)
    port: int = option("the port to listen on", "N", default="5000", read=port)
    host: str = option("the address to listen on", "ADDRESS", default="127.0.0.1", shown="127.0.0.1, not the network")
    mlflow_experiment: str | None = option("the experiment in the MLflow store", "NAME", shown="attn_exp")


def run(options: UiOptions) -> int:
    """Serve the pages until Ctrl-C; return the exit code."""
    from attn_exp.tracking.mlflow_read import pages

    experiment = options.mlflow_experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "attn_exp")
    uri = options.uri or os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE)
    uri = _checked(uri, options.host, options.port)
    found = pages(uri, experiment, options.sweep)
    if is_server(uri):
        _show(redacted(uri), found)
        return 0
    return _serve(uri, found, host=options.host, port=options.port)


def _checked(uri: str, host: str, port: int) -> str:
    """Return the absolute URI of a server, or of an existing database that MLflow can show on a free port.

    Raises UserError if the database is missing or of another version of MLflow, or the port is in use.
    """
    uri = option_uri(uri)
    if is_server(uri):
        return uri
    path = database_file(uri)
    if path is not None and not check_database(path):
        raise UserError(
            f"there is no database {path} yet: measure something with python -m attn_exp, or store a sweep that "
            "you have: attn-exp log NAME"
        )
    try:
        free = _free_port(host)
    except OSError as error:
        raise UserError(
            f"host={host} is no address of this machine: leave it out, or write host=0.0.0.0 for all of its addresses"
        ) from error
    if not _is_free(host, port):
        raise UserError(f"port {port} on {host} cannot be used: try port={free}")
    return uri


def _show(base: str, pages: Sequence[str]) -> None:
    """Print the addresses of a server's pages."""
    first, *answers = [f"{base}/{page}" for page in pages]
    print("\n".join([first, *(f"its answer: {answer}" for answer in answers)]), flush=True)


def _serve(uri: str, pages: Sequence[str], *, host: str, port: int) -> int:
    """Run MLflow's server until Ctrl-C, and show its `pages`; return 0, or 1 if it did not run."""
    # The URI is passed by the environment, because all users can see command lines. One worker without job execution
    # takes a quarter of the memory and starts in seconds.
    command = [sys.executable, "-m", "mlflow", "server", "--workers=1", f"--host={host}", f"--port={port}"]
    own = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if (path := database_file(uri)) is not None:
        command.append(f"--default-artifact-root={path.parent / 'artifacts'}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
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
                _show(base, pages)
                print("Ctrl-C ends it", flush=True)
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
    import urllib.request

    # The server is on this machine: a proxy of the environment cannot reach it.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    limit = time.monotonic() + _START_LIMIT_S
    while server.poll() is None and time.monotonic() < limit:
        try:
            with direct.open(f"{base}/health", timeout=_STOP_LIMIT_S):
                return True
        except OSError:
            time.sleep(_POLL_S)
    return False


def _end(server: "subprocess.Popen[bytes]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(_STOP_LIMIT_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


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
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        return int(server.getsockname()[1])


COMMAND = Command(
    name="ui",
    usage="[SWEEP] [port=N] [uri=URI] [OPTION=VALUE ...]",
    options=UiOptions,
    run=run,
    examples=(
        ("attn-exp ui", "all sweeps in mlruns/mlflow.db"),
        ("attn-exp ui first port=5001", "the charts of one sweep, on another port"),
        ("attn-exp ui uri=sqlite:////data/mlruns/mlflow.db", "another database"),
    ),
    exits=("0 ended by Ctrl-C", "1 MLflow's server did not run", "2 invalid command line"),
)
main = COMMAND.main
