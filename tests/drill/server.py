"""A real tracking server on loopback, to be stopped and started, and a sick one in its place."""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from test_tracking_patience import Sick

# On a busy machine: it imports for 4 s of a processor.
_START_LIMIT_S = 240.0


class Server:
    """`mlflow server` with one worker process and no jobs of its own: 4 s to start instead of 20."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.database = folder / "server.db"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs, and wait until it answers."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.database}", "--workers", "1"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"the server does not start: {(self._folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop it with all of its processes, by force if it lingers, and wait until it is gone."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextlib.contextmanager
def sick_server(answer: Callable[[Sick], None], port: int) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Answer on a port, any if it is 0, as `answer` does; yields the URI, and whether anybody has asked."""
    asked = threading.Event()

    def answered(sick: Sick) -> None:
        asked.set()
        answer(sick)

    handler = type("Handler", (Sick,), {"answer": staticmethod(answered)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        # Whoever is still being answered when the server ends is not waited for.
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked.is_set
        finally:
            server.shutdown()
