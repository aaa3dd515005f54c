"""Progress: one line per finished job, and on a terminal a line about the running job and the time left."""

import contextlib
import os
import sys
import time
from typing import TextIO

from attn_exp.core.record import Record
from attn_exp.core.text import duration
from attn_exp.results.result import result_of
from attn_exp.results.table import job_line


class Progress:
    """Prints to `stream`. The line about the running job is printed only if that is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._passing = self._stream.isatty()
        self.total = 1
        self.kept = 0
        self.done = 0
        # The backend's options in which the sweep's jobs differ.
        self.options: tuple[str, ...] = ()
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        try:
            self._clear()
            print(text, file=self._stream, flush=True)
        except OSError:
            # The reader of the output has left, or its disk is full; the sweep goes on.
            self._stream, self._passing = open(os.devnull, "w"), False  # noqa: SIM115

    def finished(self, record: Record) -> None:
        """Print the line of a finished job."""
        self.done += 1
        width = len(str(self.total))
        left = f"  {self._left()}" if self.done + self.kept < self.total else ""
        self.say(f"[{self.done + self.kept:>{width}}/{self.total}] {job_line(result_of(record), self.options)}{left}")

    def running(self, label: str) -> None:
        """Show what is being measured."""
        if self._passing:
            left = f", {self._left()}" if self.done else ""
            with contextlib.suppress(OSError):
                self._clear()
                self._stream.write(f"      measuring {label}{left}"[:100])
                self._stream.flush()

    def end(self) -> None:
        """Remove the line about the running job."""
        with contextlib.suppress(OSError):
            self._clear()

    def _left(self) -> str:
        a_job = (time.monotonic() - self._started) / max(1, self.done)
        return f"{duration(a_job * (self.total - self.kept - self.done))} left"

    def _clear(self) -> None:
        if self._passing:
            self._stream.write("\r\x1b[K")
