"""Read no more of a tracking server's answer than an honest one has, at the session through which MLflow's client asks.

Without it, an endless answer is read into memory as long as it comes. The limit holds for what is unpacked, too.
"""

import time
from collections.abc import Iterator
from typing import Any

import requests
from mlflow.utils import request_utils
from requests.adapters import BaseAdapter, HTTPAdapter

# A page of 100 runs of a GPU's sweep takes 1.3 MiB. What is streamed is a file on its way to the disk, such as a
# profiler's trace.
ANSWER_MIB, FILE_MIB = 16, 1024
# Such trouble may pass within a second (429: too many requests, 502 to 504: a proxy has no server).
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_AGAIN_S = 1.0
_CHUNK = 2**16


class LongAnswerError(requests.RequestException):
    """An answer is longer than the limit."""


def limit_answers() -> None:
    """Limit the answers of every server that MLflow's client asks in this process from now on."""
    inner = request_utils._get_request_session
    if hasattr(inner, "limited"):
        return

    def session(*args: Any, **kwargs: Any) -> requests.Session:
        given: requests.Session = inner(*args, **kwargs)  # type: ignore[no-untyped-call]
        for prefix, adapter in given.adapters.items():
            if isinstance(adapter, HTTPAdapter):
                given.adapters[prefix] = _Adapter(adapter)
        return given

    session.limited = True  # type: ignore[attr-defined]
    request_utils._get_request_session = session


class _Adapter(BaseAdapter):
    """Sends as `inner` does, and limits what is read of the answer.

    An adapter's own repetition of a request reads the whole of an answer that reports trouble first, so that it is done
    here.
    """

    def __init__(self, inner: HTTPAdapter) -> None:
        super().__init__()
        self._inner = inner
        inner.max_retries = inner.max_retries.new(status_forcelist=())

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:  # type: ignore[override]
        answer = self._inner.send(request, **kwargs)
        if answer.status_code in _TRANSIENT:
            # A file was read to its end by now: its record is tried again as a whole.
            if not hasattr(request.body, "read"):
                answer.close()
                time.sleep(_AGAIN_S)
                answer = self._inner.send(request, **kwargs)
            if answer.status_code in _TRANSIENT:
                answer.close()
                raise requests.exceptions.RetryError(f"too many {answer.status_code} error responses")
        streamed = kwargs.get("stream") and answer.ok
        answer.raw = _Limited(answer.raw, FILE_MIB if streamed else ANSWER_MIB)
        return answer

    def close(self) -> None:
        self._inner.close()


class _Limited:
    """The body of an answer, which raises `LongAnswerError` where it goes beyond `limit_mib`."""

    def __init__(self, raw: Any, limit_mib: float) -> None:
        self._raw, self._limit_mib, self._read = raw, limit_mib, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def stream(self, amt: int | None = _CHUNK, decode_content: bool | None = None) -> Iterator[bytes]:
        for chunk in self._raw.stream(amt or _CHUNK, decode_content=decode_content):
            yield self._counted(chunk)

    def read(self, amt: int | None = None, decode_content: bool | None = None) -> bytes:
        if amt is None:
            return b"".join(self.stream(decode_content=decode_content))
        return self._counted(self._raw.read(amt, decode_content=decode_content))

    def _counted(self, chunk: bytes) -> bytes:
        self._read += len(chunk)
        if self._read > self._limit_mib * 2**20:
            self._raw.close()
            raise LongAnswerError(f"an answer of more than {self._limit_mib:g} MiB")
        return chunk
