"""Sick stores: whatever a server does, a sweep waits for it no longer than it was told to, and says what is missing."""

import contextlib
import http.server
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from test_tracker_mlflow import a_record

from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.core.record_file import write_record
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.background import Background
from attn_exp.tracking.client import client_of, silence
from attn_exp.tracking.mlflow import MlflowPlace
from attn_exp.tracking.trouble import trouble

PATIENCE_S = 2.0
# Far above the patience, for the sake of a busy machine; `bench/sick_stores.py` measures what each store costs.
LIMIT_S = 20.0


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


def endless(sick: Sick, code: int = 200, packed: bool = False) -> None:
    """Answer without end, as a server does that would send 4 GiB; `packed` is a hundredth of that on the wire."""
    sick.send_response(code)
    sick.send_header("Transfer-Encoding", "chunked")
    if packed:
        sick.send_header("Content-Encoding", "gzip")
    sick.end_headers()
    packer = zlib.compressobj(wbits=31)
    while True:
        piece = b" " * 2**16
        piece = packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) if packed else piece
        sick.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        type(sick).sent += 2**16


SICK: dict[str, Callable[[Sick], None]] = {
    "429": lambda sick: sick.status(429, {"Retry-After": "3600"}),
    "503": lambda sick: sick.status(503, {"Retry-After": "3600"}),
    "hangs": lambda sick: time.sleep(60),
    "drops": lambda sick: sick.connection.close(),
    "drips": drip,
    "slow": slow,
    "wordy": lambda sick: sick.status(400, {}, b'{"error_code": "x", "message": "%b"}' % (b"x://a:" * 100_000)),
    "endless": endless,
    "endless and packed": lambda sick: endless(sick, packed=True),
    "endless refusal": lambda sick: endless(sick, 403),
    "endless trouble": lambda sick: endless(sick, 503),
    "endless redirection": lambda sick: endless(sick, 302),
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


def six_jobs(uri: str, folder: Path) -> tuple[float, str | None, str | None]:
    """Store six jobs at a sick store: seconds, and what was said at the start and at the end."""
    began = time.monotonic()
    tracker = make_tracker({"name": "mlflow", "uri": uri, "patience_s": PATIENCE_S})
    warning = tracker.open(SweepInfo("first", folder, ""))
    for job in range(6):
        record = a_record(str(job))
        own = folder / record.request.job
        own.mkdir(parents=True)
        write_record(record, own)
        tracker.settle()
        tracker.log(record, own)
    lacks = tracker.close("FINISHED", ())
    return time.monotonic() - began, warning, lacks


def a_sweep(kind: str, folder: Path) -> tuple[float, str | None, str | None, int]:
    """Store six jobs at a sick server; see `six_jobs`, and bytes that it sent."""
    with sick_server(SICK[kind]) as (uri, handler):
        return (*six_jobs(uri, folder), handler.sent)


def test_a_sweep_waits_no_longer_than_its_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sick servers at once, because what each takes is waiting."""
    monkeypatch.setattr("attn_exp.tracking.answers.ANSWER_MIB", 1)
    with ThreadPoolExecutor(len(SICK)) as pool:
        swept = dict(zip(SICK, pool.map(lambda kind: a_sweep(kind, tmp_path / kind), SICK), strict=True))
    for kind, (took_s, warning, lacks, sent) in swept.items():
        assert warning is not None and "stores nothing yet" in warning, kind
        assert lacks is not None and "lacks 6 records" in lacks, (kind, lacks)
        assert "attn-exp log" in lacks, kind
        assert took_s < LIMIT_S, (kind, took_s, warning, lacks)
        # A request is sent once or twice, and the system's buffers hold some MiB.
        assert sent < 100 * 2**20, (kind, sent)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("endless", "it sent an answer of more than 1 MiB, which was not read further"),
        ("endless and packed", "it sent an answer of more than 1 MiB, which was not read further"),
        ("endless refusal", "it sent an answer of more than 1 MiB, which was not read further"),
        ("endless redirection", "it sent an answer of more than 1 MiB, which was not read further"),
        ("endless trouble", "it cannot be reached: too many 503 error responses"),
    ],
)
def test_an_answer_is_read_up_to_a_limit(kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    silence()
    client_of("http://127.0.0.1")
    monkeypatch.setattr("attn_exp.tracking.answers.ANSWER_MIB", 1)
    monkeypatch.setattr("attn_exp.tracking.answers._AGAIN_S", 0.0)
    with sick_server(SICK[kind]) as (uri, handler):
        with pytest.raises(Exception) as caught:  # libraries below MLflow raise exceptions of their own
            client_of(uri).get_experiment_by_name("any")
        assert trouble(caught.value) == said
        # Twice at most, and the system's buffers hold some MiB.
        assert handler.sent < 50 * 2**20


def test_a_file_is_read_up_to_a_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

    from attn_exp.tracking.answers import LongAnswerError

    silence()
    client_of("http://127.0.0.1")
    monkeypatch.setattr("attn_exp.tracking.answers.ANSWER_MIB", 1)
    monkeypatch.setattr("attn_exp.tracking.answers.FILE_MIB", 3)
    with (
        sick_server(endless) as (uri, _),
        pytest.raises(LongAnswerError, match="an answer of more than 3 MiB"),
    ):
        HttpArtifactRepository(uri)._download_file("a", str(tmp_path / "a"))
    assert 2 * 2**20 <= (tmp_path / "a").stat().st_size <= 3 * 2**20


def test_a_store_that_answers_within_a_second_is_never_given_up() -> None:
    thread = Background("test", patience_s=0.1)
    stored: list[int] = []
    for number in range(8):
        thread.put(lambda number=number: (time.sleep(0.1), stored.append(number)))  # type: ignore[misc]
    assert thread.settle()
    assert stored == list(range(8))
    thread.stop()


def test_what_a_store_has_answered_of_a_long_item_is_not_counted() -> None:
    """As the end of a sweep of many jobs: parts of a tenth of a second, then one that takes too long."""
    thread = Background("test", patience_s=0.5)
    stored: list[int] = []

    def end(part_s: float, parts: int) -> None:
        for part in range(parts):
            time.sleep(part_s)
            stored.append(part)
            thread.answered()

    thread.put_always(lambda: end(0.1, 30))
    assert thread.settle()
    assert len(stored) == 30
    thread.put_always(lambda: end(0.5, 30))
    began = time.monotonic()
    assert not thread.settle()
    assert time.monotonic() - began < 5
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


def test_one_limit_holds_for_work_of_our_own_and_for_the_store() -> None:
    thread = Background("test", patience_s=4.0)
    freed = threading.Event()
    thread.put_own(lambda: time.sleep(1.5))
    thread.put_always(lambda: freed.wait(30))
    began = time.monotonic()
    assert not thread.settle(kept_s=0.8)
    at_start_s = time.monotonic() - began
    for _ in range(6):
        assert not thread.settle()
    thread.ask_again()
    assert not thread.settle()
    in_all_s = time.monotonic() - began
    freed.set()
    thread.stop()
    assert 2.0 < at_start_s < in_all_s - 1.0
    # 5.5 s, if each of the two had its own.
    assert in_all_s < 5.2


def test_time_in_which_our_thread_waits_for_a_processor_is_not_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_exp.tracking.background._queued_s", lambda thread: time.monotonic())
    thread = Background("test", patience_s=0.1)
    thread.put(lambda: time.sleep(1.3))
    assert thread.settle()
    thread.stop()


@pytest.mark.parametrize("given", [-1, True, "long", float("inf"), float("nan")])
def test_a_patience_that_is_no_number_of_seconds_is_refused(given: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a number of seconds: write tracker\.patience_s=30"):
        make_tracker({"name": "mlflow", "uri": f"sqlite:///{tmp_path}/x.db", "patience_s": given})


@pytest.mark.parametrize("choice", ["mlflow", "server"])
def test_any_store_is_waited_for_as_long_whichever_choice_names_it(choice: str) -> None:
    config = msgspec.yaml.decode((conf_folder() / "tracker" / f"{choice}.yaml").read_bytes())
    for uri in ("http://127.0.0.1:5000", "sqlite:///x.db"):
        assert MlflowPlace({**config, "uri": uri}).patience_s == 7
        assert MlflowPlace({**config, "uri": uri, "patience_s": 3}).patience_s == 3
