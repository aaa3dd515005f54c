"""Sick stores: whatever a server does, a sweep waits for it no longer than it was told to, and says what is missing."""

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_tracker_mlflow import a_record

from attn_exp.core.errors import UserError
from attn_exp.core.record_file import write_record
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.background import Background

PATIENCE_S = 2.0
# Two more seconds for the last try, and the margin of a busy machine, which has to import MLflow too.
LIMIT_S = PATIENCE_S + 2.0 + 6.0


class Sick(http.server.BaseHTTPRequestHandler):
    """Answers each request as `answer` does, which the server of the test sets."""

    protocol_version = "HTTP/1.1"
    answer: Callable[["Sick"], None]

    def _any(self) -> None:
        with contextlib.suppress(OSError):
            type(self).answer(self)

    do_GET = do_POST = do_PUT = do_PATCH = _any

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def status(self, code: int, headers: dict[str, str], body: bytes = b"{}") -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def drip(sick: Sick) -> None:
    """Send one byte of the answer every half second."""
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
        sick.wfile.write(bytes([byte]))
        time.sleep(0.5)


def slow(sick: Sick) -> None:
    """Answer rightly what an empty server would, two seconds late."""
    time.sleep(2.0)
    sick.status(404, {}, b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}')


SICK: dict[str, Callable[[Sick], None]] = {
    "429": lambda sick: sick.status(429, {"Retry-After": "3600"}),
    "503": lambda sick: sick.status(503, {"Retry-After": "3600"}),
    "hangs": lambda sick: time.sleep(60),
    "drops": lambda sick: sick.connection.close(),
    "drips": drip,
    "slow": slow,
}


@contextlib.contextmanager
def sick_server(answer: Callable[[Sick], None]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (Sick,), {"answer": staticmethod(answer)})
    )
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", SICK)
def test_a_sweep_waits_no_longer_than_its_patience(kind: str, tmp_path: Path) -> None:
    import mlflow  # noqa: F401  (which takes seconds that are not the server's)

    with sick_server(SICK[kind]) as uri:
        began = time.monotonic()
        tracker = make_tracker({"name": "mlflow", "uri": uri, "patience_s": PATIENCE_S})
        warning = tracker.open(SweepInfo("first", tmp_path, ""))
        for job in range(6):
            record = a_record(str(job))
            folder = tmp_path / record.request.job
            folder.mkdir()
            write_record(record, folder)
            tracker.settle()
            tracker.log(record, folder)
        lacks = tracker.close("FINISHED", ())
        took_s = time.monotonic() - began
    assert warning is not None and "stores nothing yet" in warning
    assert lacks is not None and "lacks 6 records" in lacks
    assert "attn-exp log" in lacks
    assert took_s < LIMIT_S, (took_s, warning, lacks)


def test_a_store_that_answers_within_a_second_is_never_given_up() -> None:
    thread = Background("test", patience_s=0.1)
    stored: list[int] = []
    for number in range(8):
        thread.put(lambda number=number: (time.sleep(0.1), stored.append(number)))  # type: ignore[misc]
    assert thread.settle()
    assert stored == list(range(8))
    thread.stop()


def test_work_of_our_own_is_waited_for_and_a_stuck_store_is_not() -> None:
    thread = Background("test", patience_s=0.2)
    done, freed = [], threading.Event()
    thread.put_own(lambda: (time.sleep(1.5), done.append("own")))
    assert thread.settle()
    assert done == ["own"]
    thread.put(lambda: freed.wait(30))
    thread.put(lambda: done.append("later"))
    began = time.monotonic()
    assert not thread.settle()
    assert not thread.settle()
    assert time.monotonic() - began < 5
    freed.set()
    # The patience is gone: what was queued is skipped until somebody asks again.
    thread.ask_again()
    thread.put(lambda: done.append("again"))
    assert thread.settle()
    assert done[-1] == "again"
    thread.stop()


@pytest.mark.parametrize("given", [-1, True, "long", float("inf"), float("nan"), None])
def test_a_patience_that_is_no_number_of_seconds_is_refused(given: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a number of seconds: write tracker\.patience_s=30"):
        make_tracker({"name": "mlflow", "uri": f"sqlite:///{tmp_path}/x.db", "patience_s": given})
