"""The worker: runs jobs in a process that it replaces, and finds out how a job ended that left no record."""

import contextlib
import json
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_exp.core.errors import how_it_ended
from attn_exp.core.files import cut_middle, rewrite
from attn_exp.core.record.file import LOG_NAME
from attn_exp.core.record.status import Status
from attn_exp.core.redaction import redacted
from attn_exp.run.worker_process import WorkerProcess

START_LIMIT_S = 300.0
# A job's log keeps its beginning and end, so many bytes in all.
LOG_BYTES = 16 << 20
# A process's pipe may close a moment before it ends.
_END_S = 5.0
# The worker's phase after each of its messages; it sends `profile` before each profiler.
_PHASES = {"begin": "job", "profile": "profile", "end": "idle", "poisoned": "idle", "outdated": "idle"}
# The stages of a job in the phase `job`, for people who wait.
_STAGES = ("check", "compile", "time")


@dataclass(frozen=True)
class Outcome:
    """How a job ended; `status` and `reason` are None if the worker wrote the record itself.

    `profiling` says that a profiler failed; the record of the timing exists then.
    """

    folder: Path
    status: Status | None = None
    reason: str | None = None
    profiling: bool = False


class Worker:
    """Runs jobs in a worker process, one after another; with `reuse` in one process.

    The limits are of each job, and of each profiler. `variables` are names and patterns of environment variables that
    the process gets besides those that computing needs.
    """

    def __init__(
        self,
        *,
        reuse: bool,
        timeout_s: float | None,
        profiler_timeout_s: float | None = None,
        variables: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self.reuse = reuse
        self.timeout_s = timeout_s
        self.profiler_timeout_s = profiler_timeout_s
        self.variables = tuple(variables)
        self.python = python
        self._pending: deque[Path] = deque()
        self._process: WorkerProcess | None = None
        # How many of the pending jobs the process knows, and how many it has ended.
        self._sent = self._served = 0
        # The phase is `start`, `idle`, `job` or `profile`; time limits count from its beginning.
        self._phase, self._since = "start", 0.0
        self._oom_kills = 0

    def takes(self, other: "Worker") -> bool:
        """Return whether a worker that was started with the options of `other` can be used instead of this one."""
        return self.reuse and other.reuse and (self.variables, self.python) == (other.variables, other.python)

    def start(self) -> None:
        """Start the process; it imports torch while the parent goes on."""
        self._started()

    def submit(self, folder: Path) -> None:
        """Queue a job's folder."""
        self._pending.append(folder)
        self._send(self._started())

    def wait(self, stage: Callable[[str], None] = lambda stage: None) -> Outcome:
        """Wait for the oldest job: until it has a record, the worker dies, or the time limit is over.

        `stage` is called with `check`, `compile`, `time` or `profile` when the job begins to do that.
        """
        outcome = self._ended(stage)
        cut_middle(outcome.folder / LOG_NAME, LOG_BYTES)
        # A worker may print secrets that it was told.
        rewrite(outcome.folder / LOG_NAME, redacted)
        return outcome

    def close(self) -> None:
        """Kill the process group and drop queued jobs."""
        self._pending.clear()
        self._kill()

    def interrupt(self) -> None:
        """Kill the process at once. May be called from another thread than `wait`, which then returns."""
        if (process := self._process) is not None:
            process.interrupt()

    def _started(self) -> WorkerProcess:
        """Return the process, which is started if there is none."""
        if self._process is None:
            self._process = WorkerProcess(self.variables, self.python)
            self._sent = self._served = 0
            self._since, self._phase = time.monotonic(), "start"
            self._oom_kills = _oom_kills()
        return self._process

    def _send(self, process: WorkerProcess) -> None:
        """Send the process the folders of all queued jobs, or only the first one if it is not reused."""
        ahead = len(self._pending) if self.reuse else min(1, len(self._pending))
        # If it is dead, `wait` will notice.
        while self._sent < ahead and process.send(json.dumps(str(self._pending[self._sent]))):
            self._sent += 1

    def _ended(self, stage: Callable[[str], None]) -> Outcome:
        folder = self._pending[0]
        if self._phase == "idle":
            self._since = time.monotonic()
        while True:
            process = self._started()
            self._send(process)
            line = process.reply(self._seconds_left())
            if line is None and self._served and self._phase == "idle":
                # It ended between two jobs, through what the last one left behind: the next one is not to blame.
                self._kill()
                continue
            if line is None:
                return self._failed_outcome(process, folder)
            if (word := _word(line, folder)) is None:
                continue
            if word in (*_STAGES, "profile"):
                stage(word)
            if word in _STAGES:
                continue
            self._phase = _PHASES.get(word, "idle")
            self._since = time.monotonic()
            if word == "begin":
                self._oom_kills = _oom_kills()
            if word == "outdated":
                # A module that was imported cannot be forgotten: another process loads the backend as it is now.
                self._kill()
            if word in ("end", "poisoned"):
                self._pending.popleft()
                self._sent -= 1
                self._served += 1
                if word == "poisoned" or not self.reuse:
                    self._kill()
                return Outcome(folder)

    def _seconds_left(self) -> float | None:
        limit = self._limit_s()
        return None if limit is None else max(0.0, self._since + limit - time.monotonic())

    def _limit_s(self) -> float | None:
        """The time limit of the present phase."""
        own = {"start": START_LIMIT_S, "profile": self.profiler_timeout_s}
        return own.get(self._phase, self.timeout_s)

    def _failed_outcome(self, process: WorkerProcess, folder: Path) -> Outcome:
        """Find out why there will be no record, and remove the process."""
        phase, limit, timed_out = self._phase, self._limit_s(), self._seconds_left() == 0.0
        began, profiling = phase in ("job", "profile"), phase == "profile"
        code = process.exit_code(0.0 if timed_out else _END_S)
        words = "" if began else process.last_words()
        self._kill()
        self._pending.popleft()
        if code is None and timed_out:
            what = {"start": "the worker's start", "profile": "profiling"}.get(phase, "the job")
            return Outcome(folder, "timeout", f"{what} took longer than {limit} s and was killed", profiling)
        if code is None:
            reason = f"the worker stopped answering and was killed: {_see(folder / LOG_NAME)}"
            return Outcome(folder, "crashed", reason, profiling)
        when = " while profiling" if profiling else "" if began else " before it took the job"
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return Outcome(folder, "out_of_memory", f"the kernel killed the worker for memory{when}", profiling)
        words = words or _see(folder / LOG_NAME)
        return Outcome(folder, "crashed", f"the worker {how_it_ended(code)}{when}: {words}", profiling)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process, self._sent = None, 0


def _word(line: str, folder: Path) -> str | None:
    """Return the word of the worker's message about a job, or `ready`; None for what user code wrote into the pipe."""
    job = json.dumps(str(folder))
    words = (*_PHASES, *_STAGES)
    return "ready" if line == "ready" else next((word for word in words if line.endswith(f"{word} {job}")), None)


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for memory in this control group, or else on this machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            if counts := re.findall(r"^oom_kill (\d+)$", Path(path).read_text(), re.MULTILINE):
                return int(counts[0])
    return 0


def _see(log: Path) -> str:
    """Return where a job's last words are, if it left any."""
    return f"see {log}" if log.is_file() and log.stat().st_size else "it printed nothing"
