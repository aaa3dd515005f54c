"""MLflow's own web pages for this project's runs: its server, and the address of the list to open."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence

from attn_exp.core.errors import UserError
from attn_exp.core.redaction import redacted
from attn_exp.tracking.client import ENVIRONMENT
from attn_exp.tracking.database import check_database, database_file
from attn_exp.tracking.location import is_server, option_uri

_START_LIMIT_S, _STOP_LIMIT_S, _POLL_S = 90.0, 5.0, 0.2
# The server is on this machine: a proxy of the environment cannot reach it.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def checked(uri: str, host: str, port: int) -> str:
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


def show(base: str, pages: Sequence[str]) -> None:
    """Print the addresses of a server's pages."""
    first, *answers = [f"{base}/{page}" for page in pages]
    print("\n".join([first, *(f"its answer: {answer}" for answer in answers)]), flush=True)


def serve(uri: str, pages: Sequence[str], *, host: str, port: int) -> int:
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
                show(base, pages)
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
    limit = time.monotonic() + _START_LIMIT_S
    while server.poll() is None and time.monotonic() < limit:
        try:
            with _DIRECT.open(f"{base}/health", timeout=_STOP_LIMIT_S):
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
