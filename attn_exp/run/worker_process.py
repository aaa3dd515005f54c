"""One worker process: its start, its messages, and its end together with all that has come of it."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from attn_exp.core.errors import last_message
from attn_exp.core.process import descendants, guarded, kill_all, kill_marked, kill_orphans, own_mark
from attn_exp.run.worker_variables import worker_variables

# The module that runs as the worker process.
WORKER = "attn_exp.worker"
# Names the worker in its environment, which its children inherit.
_MARK = "ATTN_EXP_WORKER"
# A message is a word and a path.
_LONGEST_MESSAGE = 1 << 16


class WorkerProcess:
    """A process in a group of its own, which imports torch while the parent goes on.

    Args:
        variables: names and patterns of environment variables that it gets besides those that computing needs.
        python: the interpreter, by default this one.
        more: further environment variables.

    Attributes:
        pid: the process's number.
    """

    def __init__(
        self, variables: Sequence[str] = (), python: str = sys.executable, more: Mapping[str, str] | None = None
    ) -> None:
        self._replies, reply_fd = os.pipe()
        os.set_inheritable(reply_fd, True)
        # What it prints before it has a job, and with it a log.
        self._startup = tempfile.TemporaryFile()  # noqa: SIM115
        self._mark = own_mark()
        command = [python, "-m", WORKER, "--serve", "--reply-fd", str(reply_fd)]
        self._process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._startup,
            pass_fds=[reply_fd],
            env=worker_variables(os.environ, variables) | dict(more or {}) | {_MARK: self._mark},
            start_new_session=True,
        )
        os.close(reply_fd)
        self.pid = self._process.pid
        # Daemons of a worker whose parent was killed: they would go on using the device.
        kill_orphans(_MARK)
        self._pidfd = os.pidfd_open(self.pid)
        self._buffer = b""
        # What came of the process, as last seen.
        self._below: set[tuple[int, str]] = set()

    def send(self, line: str) -> bool:
        """Send a line; return whether the process took it, which a dead one does not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def reply(self, limit_s: float | None) -> str | None:
        """Return the next line, or None if the process died or `limit_s` is over. Sleeps; polling would burn a core."""
        line = self._line(limit_s)
        # If it ends by itself, nothing says any more what was below it.
        self._below |= descendants(self.pid)
        return line

    def _line(self, limit_s: float | None) -> str | None:
        until = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            with selectors.DefaultSelector() as selector:
                selector.register(self._replies, selectors.EVENT_READ)
                selector.register(self._pidfd, selectors.EVENT_READ)
                left_s = None if until is None else max(0.0, until - time.monotonic())
                ready = {key.fd for key, _ in selector.select(left_s)}
            if self._replies in ready:
                chunk = os.read(self._replies, 4096)
                # User code may write into the pipe too, and without end.
                self._buffer = (self._buffer + chunk)[-_LONGEST_MESSAGE:]
                if chunk:
                    continue
            # Its last message, if any, has been read by now.
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def exit_code(self, limit_s: float) -> int | None:
        """Wait for the end and return the exit code, or None if the process still runs after `limit_s`."""
        try:
            return self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """Return the last line that the process printed before it had a job."""
        self._startup.seek(0)
        return last_message(self._startup.read().decode(errors="replace"))

    def interrupt(self) -> None:
        """Kill the process group at once, and wait for nothing. May be called from another thread than the rest."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process with all that has come of it, and wait for its end. Call nothing else after this."""
        self._below |= descendants(self.pid)
        # The whole group, with compilers and other children of the job; SIGKILL, since SIGTERM can be ignored.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        # And those that have left it: a daemon would go on using the device, beside whatever is measured next.
        kill_marked(_MARK, self._mark)
        kill_all(self._below)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._replies)
        os.close(self._pidfd)
        self._startup.close()
