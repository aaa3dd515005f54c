"""Sick stores: whatever a server does, a sweep goes on and says what is missing."""

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_tracker_mlflow import a_record

from attn_exp.core.errors import UserError
from attn_exp.core.record.file import write_record
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.background import Background

PATIENCE_S = 2.0


class Sick(http.server.BaseHTTPRequestHandler):
    """Answers each request as `answer` does, which the server of the test sets."""

    protocol_version = "HTTP/1.1"
    answer: Callable[["Sick"], None]
    sent = 0

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
    "wordy": lambda sick: sick.status(400, {}, b'{"error_code": "x", "message": "%b"}' % (b"x://a:" * 100_000)),
}


@contextlib.contextmanager
def sick_server(answer: Callable[[Sick], None]) -> Iterator[tuple[str, type[Sick]]]:
    handler = type("Handler", (Sick,), {"answer": staticmethod(answer)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()


def six_jobs(uri: str, folder: Path) -> tuple[str | None, str | None]:
    """Store six jobs at a sick store: what was said at the start and at the end."""
    tracker = make_tracker({"name": "mlflow", "uri": uri, "patience_s": PATIENCE_S})
    warning = tracker.open(SweepInfo("first", folder, ""))
    for job in range(6):
        record = a_record(str(job))
        own = folder / record.request.job
        own.mkdir(parents=True)
        write_record(record, own)
        tracker.settle()
        tracker.log(record, own)
    lacks = tracker.close("FINISHED")
    return warning, lacks


def a_sweep(kind: str, folder: Path) -> tuple[str | None, str | None]:
    """Store six jobs at a sick server; see `six_jobs`."""
    with sick_server(SICK[kind]) as (uri, _):
        return six_jobs(uri, folder)


def test_a_sweep_goes_on_without_a_sick_server(tmp_path: Path) -> None:
    """All sick servers at once, because what each takes is waiting."""
    with ThreadPoolExecutor(len(SICK)) as pool:
        swept = dict(zip(SICK, pool.map(lambda kind: a_sweep(kind, tmp_path / kind), SICK), strict=True))
    for kind, (warning, lacks) in swept.items():
        assert warning is not None and "stores nothing yet" in warning, kind
        assert lacks is not None and "lacks 6 records" in lacks, (kind, lacks)
        assert "attn-exp log" in lacks, kind


def test_a_server_that_answers_is_waited_for_however_slow_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty answers, each 1.3 s after its request by a clock that stands between them."""
    now, asked, answered = [0.0], threading.Semaphore(0), threading.Semaphore(1)
    monkeypatch.setattr("attn_exp.tracking.background.time.monotonic", lambda: now[0])
    background = Background("slow", patience_s=PATIENCE_S)

    def requests() -> None:
        for _ in range(30):
            asked.acquire()
            background.answered()
            answered.release()

    def later() -> None:
        answered.acquire()
        now[0] += 1.3
        asked.release()

    background.put(requests)
    assert background.settle(each=later)
    silent = threading.Event()
    background.put(silent.wait)
    assert not background.settle(each=lambda: now.__setitem__(0, now[0] + 1.3))
    silent.set()
    background.stop()


@pytest.mark.parametrize("given", [-1, True, "long", float("inf"), float("nan")])
def test_a_patience_that_is_no_number_of_seconds_is_refused(given: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a number of seconds: write tracker\.patience_s=30"):
        make_tracker({"name": "mlflow", "uri": f"sqlite:///{tmp_path}/x.db", "patience_s": given})
