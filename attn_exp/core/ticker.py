"""A line on standard error that says what is being done, for how long, and how long it will take."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TextIO

from attn_exp.core.text import duration, terminal_columns

# A child process whose environment has STAGES writes its stages to standard output, in lines that begin with STAGE.
STAGES, STAGE = "ATTN_EXP_STAGES", "\x1e"
# Whatever ends sooner needs no line.
DELAY_S = 0.4
# A file is read later, and by programs that take any line for a mistake's.
FILE_DELAY_S = 5.0
# On a terminal the line is written anew; in a file each is one more.
_TERMINAL_S, _STAGE_S, _FILE_S = 0.25, 1.0, 10.0


class Ticker:
    """Says the stage, its elapsed time and the time left on `stream`, from a thread of its own.

    On a terminal it is one line that changes four times a second and is removed in the end. Elsewhere there is a line
    for each stage that lasts a second, and every ten seconds. Nothing is said in the first 0.4 s (elsewhere: 5 s), or
    ever if `quiet` is set; a terminal hears `at_once` if that is.
    """

    def __init__(
        self, stream: TextIO | None = None, *, quiet: bool = False, at_once: bool = False, delay_s: float | None = None
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self.quiet = quiet
        usual_s = FILE_DELAY_S if not self.terminal else 0.0 if at_once else DELAY_S
        self._delay_s = usual_s if delay_s is None else delay_s
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._text, self._share, self._expected_s = "", 0.0, 0.0
        self._began = self._said_at = time.monotonic()
        self._shown = self._new = False
        self._thread: threading.Thread | None = None

    def stage(self, text: str, share: float = 0.0, *, brief: bool = False, expected_s: float = 0.0) -> None:
        """Begin a stage, or go on with one; `share` of it is done, or it takes about `expected_s` seconds.

        A `brief` one has no line of its own in a file.
        """
        with self._lock:
            self._expected_s = expected_s
            if text != self._text:
                self._text, self._began, self._new = text, time.monotonic(), not brief
            self._share = share
            if self._thread is None and not self.quiet:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the line while something else is printed."""
        with self._lock:
            self._clear()
            yield

    def idle(self) -> None:
        """Say nothing until the next stage."""
        with self._lock:
            self._clear()
            self._text = ""

    def close(self) -> None:
        """Remove the line; nothing is said any more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        with self._lock:
            self._clear()

    def __enter__(self) -> "Ticker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def relay(self, lines: Iterable[str]) -> None:
        """Show the stages among a child's lines, and print the others."""
        for line in lines:
            if line.startswith(STAGE):
                share, _, text = line[len(STAGE) :].strip().partition(" ")
                self.stage(text, float(share))
                continue
            with self.aside():
                print(line, end="", flush=True)

    def line(self) -> str:
        """Return the line as it is now."""
        seconds = time.monotonic() - self._began
        parts = [self._text, duration(seconds)]
        if 0.0 < self._share < 1.0 and seconds > 1.0:
            parts.append(f"{duration(seconds / self._share * (1 - self._share))} left")
        elif seconds < self._expected_s:
            parts.append(f"about {duration(self._expected_s - seconds)} left")
        return ", ".join(parts)

    def _run(self) -> None:
        self._over.wait(self._delay_s)
        while not self._over.is_set():
            with self._lock:
                self._show()
            self._over.wait(_TERMINAL_S if self.terminal else _STAGE_S)

    def _show(self) -> None:
        now = time.monotonic()
        if not self._text or not (self.terminal or self._new or now - self._said_at >= _FILE_S):
            return
        self._new, self._said_at = False, now
        with contextlib.suppress(OSError, ValueError):
            if self.terminal:
                width = terminal_columns(self._stream) or shutil.get_terminal_size().columns
                self._stream.write(f"\r\x1b[K{self.line()[: max(1, width - 1)]}")
                self._shown = True
            else:
                self._stream.write(f"{self.line()}\n")
            self._stream.flush()

    def _clear(self) -> None:
        if self._shown:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write("\r\x1b[K")
                self._stream.flush()
            self._shown = False
