"""One line on standard error that says what is being done; rich draws it on a terminal."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from attn_exp.core.text import duration

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

# A child process whose environment has STAGES writes its stages to standard output, in lines that begin with STAGE.
STAGES, STAGE = "ATTN_EXP_STAGES", "\x1e"


class LiveLine:
    """Shows a bar, a text, a stage and the time left, else the elapsed time; removes them when it is closed.

    It shows nothing if `stream` is no terminal, or if it is `quiet`.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        # Tasks of a launcher report from a thread of their own.
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._text = self._stage = ""
        self._done = self._total = self._began = self._ends = 0.0

    def show(self, text: str, *, done: float = 0.0, total: float = 0.0, left_s: float | None = None) -> None:
        """Begin `text`, or go on with it. Without `left_s`, the time left follows from `done` of `total`."""
        if self.quiet:
            self.close()
            return
        with self._lock:
            now = time.monotonic()
            if text != self._text:
                self._text, self._stage, self._began = text, "", now
            if left_s is None:
                left_s = (now - self._began) * (total / done - 1) if done else 0.0
            self._done, self._total, self._ends = done, total, now + left_s
            if self._terminal and self._live is None:
                self._draw()

    def stage(self, text: str) -> None:
        """Say how far it is with what is being done."""
        self._stage = text

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the line while something else is printed."""
        with self._lock:
            drawn = self._live is not None
            self._remove()
            yield
            if drawn:
                self._draw()

    def close(self) -> None:
        """Remove the line until something is shown again."""
        with self._lock:
            self._remove()
            self._text = ""

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self) -> None:
        # Only for those who see it: the imports take a tenth of a second.
        from rich.console import Console
        from rich.live import Live

        # Drawn twice a second and not more often: the CPU may be what is measured.
        live = Live(
            console=Console(file=self._stream, force_terminal=True), get_renderable=self._line, transient=True,
            refresh_per_second=2, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        # A terminal that has gone ends nothing.
        with contextlib.suppress(OSError):
            live.start(refresh=True)
            self._live = live

    def _remove(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()

    def _line(self) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = time.monotonic()
        left_s = self._ends - now
        seconds = f"{duration(left_s)} left" if left_s > 0.5 else duration(now - self._began)
        bar = [ProgressBar(self._total, self._done, width=12)] if self._total else []
        # A terminal would break a line that is too long.
        texts = [Text(text, no_wrap=True, overflow="crop") for text in (self._text, self._stage) if text]
        line = Table.grid(padding=(0, 2))
        line.add_row(*bar, *texts, Text(seconds))
        line.columns[-1].no_wrap = True
        return line
