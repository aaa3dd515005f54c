"""The progress of a sweep: a line for each finished job, and one about the running one."""

import sys
import time
from typing import TextIO

from attn_exp.core.live_line import LiveLine
from attn_exp.core.record.record import Record
from attn_exp.core.text import at_width, duration
from attn_exp.results.result import result_of
from attn_exp.results.table import job_line


class Progress:
    """Prints results to standard output and progress to standard error, or both to `stream`; `line` is below them."""

    def __init__(self, stream: TextIO | None = None, line: LiveLine | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._notes = stream if stream is not None else sys.stderr
        self.line = line if line is not None else LiveLine(self._notes)
        self.total = 1
        self.kept = 0
        self.done = 0
        # Why standard output did not take a result; None if it did, or if its reader has left.
        self.unwritten: str | None = None
        # The backend's options in which the sweep's jobs differ.
        self.options: tuple[str, ...] = ()
        self._started = self._ends = time.monotonic()

    def say(self, text: str) -> None:
        """Print a result: a line that stays, on standard output."""
        error = self._print(text, self._stream)
        if error is not None and not isinstance(error, BrokenPipeError):
            self.unwritten = error.strerror or str(error)

    def note(self, text: str) -> None:
        """Print a line that stays, on standard error; none if the live line is quiet."""
        if not self.line.quiet:
            self._print(text, self._notes)

    def keep(self) -> None:
        """Count a job that was done before."""
        self.kept += 1
        self._recount()

    def finished(self, record: Record, others: int = 0) -> None:
        """Print the line of a finished job; so many `others` ended with it, whose lines come next."""
        self.done += 1
        self._recount()
        now, ended = time.monotonic(), self.done + self.kept
        left_s = (now - self._started) / (self.done + others) * max(0, self.total - ended - others)
        self._ends = now + left_s
        left = f"  {duration(left_s)} left" if ended < self.total else ""
        line = f"[{ended:>{len(str(self.total))}}/{self.total}] {job_line(result_of(record), self.options)}{left}"
        self.note(at_width(line, self._notes))

    def running(self, label: str) -> None:
        """Show which job is being measured."""
        ended, total = self.done + self.kept, max(self.done + self.kept + 1, self.total)
        left_s = self._ends - time.monotonic()
        # The bar of a single job would be empty until it disappears.
        self.line.show(f"{ended + 1}/{total} {label}", done=ended, total=total if total > 1 else 0, left_s=left_s)

    def _recount(self) -> None:
        # Other sweepers do not say how many jobs there will be.
        self.total = max(self.total, self.done + self.kept)

    def _print(self, text: str, stream: TextIO) -> OSError | None:
        # The reader of the output has left, or its disk is full; the sweep goes on.
        try:
            with self.line.aside():
                print(text, file=stream, flush=True)
        except OSError as error:
            return error
        return None
