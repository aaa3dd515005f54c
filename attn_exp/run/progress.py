"""Progress on standard error: a line for each finished job, one about the running one. Results on standard output."""

import os
import sys
import time
from typing import TextIO

from attn_exp.core.record import Record
from attn_exp.core.text import coloured_status, duration
from attn_exp.core.ticker import Ticker
from attn_exp.results.result import result_of
from attn_exp.results.table import job_line


class Progress:
    """Prints results to `stream` and progress to `notes`; both are standard output and standard error by default.

    Nothing but results is printed with `quiet`.
    """

    def __init__(self, stream: TextIO | None = None, ticker: Ticker | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._notes = stream if stream is not None else sys.stderr
        self._ticker = ticker if ticker is not None else Ticker(self._notes)
        self.quiet = False
        self.total = 1
        self.kept = 0
        self.done = 0
        # The backend's options in which the sweep's jobs differ.
        self.options: tuple[str, ...] = ()
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print a result: a line that stays, on standard output."""
        self._stream = self._print(text, self._stream)

    def note(self, text: str) -> None:
        """Print a line that stays, on standard error."""
        if not self.quiet:
            self._notes = self._print(text, self._notes)

    def keep(self) -> None:
        """Count a job that was done before."""
        self.kept += 1
        self._recount()

    def _recount(self) -> None:
        # Other sweepers do not say how many jobs there will be.
        self.total = max(self.total, self.done + self.kept)

    def finished(self, record: Record) -> None:
        """Print the line of a finished job."""
        self.done += 1
        self._recount()
        width = len(str(self.total))
        left = f"  {self._left()}" if self.done + self.kept < self.total else ""
        line = coloured_status(job_line(result_of(record), self.options), record.status, self._notes)
        self.note(f"[{self.done + self.kept:>{width}}/{self.total}] {line}{left}")
        self._ticker.stage("finishing", brief=True)

    def running(self, label: str) -> None:
        """Show what is being measured."""
        position = self.done + self.kept + 1
        left = f", {self._left()}" if self.done and position <= self.total else ""
        self._ticker.stage(f"[{position}/{max(position, self.total)}] measuring {label}{left}", brief=True)

    def doing(self, text: str, share: float = 0.0) -> None:
        """Show what is being done beside measuring, of which a share is done."""
        self._ticker.stage(text, share, brief=True)

    def end(self) -> None:
        """Remove the line about the running job."""
        self._ticker.close()

    def _print(self, text: str, stream: TextIO) -> TextIO:
        try:
            with self._ticker.aside():
                print(text, file=stream, flush=True)
        except OSError:
            # The reader of the output has left, or its disk is full; the sweep goes on.
            return open(os.devnull, "w", encoding="utf-8")
        return stream

    def _left(self) -> str:
        a_job = (time.monotonic() - self._started) / max(1, self.done)
        return f"{duration(a_job * (self.total - self.kept - self.done))} left"
