"""The worker: runs jobs in a process that it replaces, and finds out how a job ended that left no record.

Jobs that are measured in turns go to the process together. If it dies, the others are measured again in a new one, and
whoever may be to blame alone: a job that dies alone is charged.
"""

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
from attn_exp.execution.worker_process import WorkerProcess

START_LIMIT_S = 300.0
# A job's log keeps its beginning and end, so many bytes in all.
LOG_BYTES = 16 << 20
# A process's pipe may close a moment before it ends.
_END_S = 5.0
# What the worker begins to do, for people who wait: in a job, or in all that are measured in turns.
_STAGES = ("check", "compile", "time", "profile")
# The worker's phase after each of its messages.
_PHASES = {
    **dict.fromkeys(("begin", "check", "compile", "time", "done"), "job"),
    "profile": "profile",
    **dict.fromkeys(("ready", "end", "poisoned", "outdated"), "idle"),
}


@dataclass(frozen=True)
class Outcome:
    """How a job ended; `status` and `reason` are None if the worker wrote the record itself.

    `profiling` says that a profiler failed; the record of the timing exists then.
    """

    folder: Path
    status: Status | None = None
    reason: str | None = None
    profiling: bool = False


@dataclass
class _Run:
    """Jobs that the process measures in turns: the folders without an outcome, and the one that is at work, if known.

    `apart` says that their case has other jobs, which were measured without them.
    """

    message: str
    folders: list[Path]
    beside: Path | None = None
    apart: bool = False
    # The number of the run that broke off, whose jobs are tried one by one; 0 for others.
    trial: int = 0
    at: Path | None = None


class Worker:
    """Runs jobs in a worker process, one group after another; with `reuse` in one process.

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
        self._runs: deque[_Run] = deque()
        # The folders in the order of their submission, and what is known of them.
        self._order: deque[Path] = deque()
        self._outcomes: dict[Path, Outcome] = {}
        self._trials = 0
        self._process: WorkerProcess | None = None
        # How many of the runs the process knows, and how many it has ended.
        self._sent = self._served = 0
        # The phase is `start`, `idle`, `job` or `profile`; time limits count from its beginning.
        self._phase, self._since = "start", 0.0
        self._oom_kills = 0

    def takes(self, worker: "Worker") -> bool:
        """Return whether a worker that was started with the options of `worker` can be used instead of this one."""
        return self.reuse and worker.reuse and (self.variables, self.python) == (worker.variables, worker.python)

    def start(self) -> WorkerProcess:
        """Return the process, which is started if there is none; it imports torch while the parent goes on."""
        if self._process is None:
            self._process = WorkerProcess(self.variables, self.python)
            self._sent = self._served = 0
            self._since, self._phase = time.monotonic(), "start"
            self._oom_kills = _oom_kills()
        return self._process

    def submit(self, *folders: Path, beside: Path | None = None) -> None:
        """Queue the folders of jobs that are measured in turns, one by one without `reuse`.

        `beside` is the folder of a job that has a record, and is measured beside them once more.
        """
        self._order.extend(folders)
        if self.reuse:
            self._add(folders, beside)
        else:
            for folder in folders:
                self._add([folder], None, apart=True)
        self._send(self.start())

    def wait(self, stage: Callable[[str, Path | None], None] = lambda stage, folder: None) -> Outcome:
        """Wait for the oldest job: until it has a record, the worker dies, or the time limit is over.

        `stage` is called with `check`, `compile`, `time` or `profile` when a job begins to do that, and with its
        folder; with None when several do in turns.
        """
        while self._order[0] not in self._outcomes:
            self._step(stage)
        folder = self._order.popleft()
        outcome = self._outcomes.pop(folder)
        cut_middle(folder / LOG_NAME, LOG_BYTES)
        # A worker may print secrets that it was told.
        rewrite(folder / LOG_NAME, redacted)
        return outcome

    def close(self) -> None:
        """Kill the process group and drop queued jobs."""
        for queue in (self._runs, self._order, self._outcomes):
            queue.clear()
        self._kill()

    def interrupt(self) -> None:
        """Kill the process at once. May be called from another thread than `wait`, which then returns."""
        if (process := self._process) is not None:
            process.interrupt()

    def _add(
        self, folders: Sequence[Path], beside: Path | None, *, apart: bool = False, first: bool = False, trial: int = 0
    ) -> None:
        """Queue a run, before all others if it is the rest of one."""
        message = json.dumps(
            {"folders": [str(folder) for folder in folders], "beside": beside and str(beside), "apart": apart}
        )
        (self._runs.appendleft if first else self._runs.append)(_Run(message, list(folders), beside, apart, trial))

    def _send(self, process: WorkerProcess) -> None:
        """Send the process all queued runs, or only the first one if it is not reused."""
        ahead = len(self._runs) if self.reuse else min(1, len(self._runs))
        # If it is dead, `wait` will notice.
        while self._sent < ahead and process.send(self._runs[self._sent].message):
            self._sent += 1

    def _step(self, stage: Callable[[str, Path | None], None]) -> None:
        """Read messages until one or more jobs have an outcome, or are queued again."""
        run = self._runs[0]
        if self._phase == "idle":
            self._since = time.monotonic()
        while True:
            process = self.start()
            self._send(process)
            line = process.reply(self._seconds_left())
            if line is None and self._served and self._phase == "idle":
                # It ended between two jobs, through what the last one left behind: the next one is not to blame.
                self._kill()
                continue
            if line is None:
                self._died(process, run)
                return
            if (message := _word(line, run)) is None:
                continue
            word, folder = message
            if word in _STAGES:
                run.at = folder
                stage(word, folder)
            # Each job has the whole time to itself, also behind the profilers of another.
            self._phase, self._since = _PHASES[word], time.monotonic()
            if word == "done":
                assert folder is not None
                self._outcomes[folder] = Outcome(folder)
                run.folders.remove(folder)
                return
            if word == "begin":
                self._oom_kills = _oom_kills()
            if word == "outdated":
                # A module that was imported cannot be forgotten: another process loads the backend as it is now.
                self._kill()
            if word in ("end", "poisoned"):
                self._runs.popleft()
                self._sent -= 1
                self._served += 1
                if word == "poisoned" or not self.reuse:
                    self._kill()
                if word == "poisoned":
                    self._broke_off(run)
                else:
                    self._outcomes |= {folder: Outcome(folder) for folder in run.folders}
                return

    def _broke_off(self, run: _Run) -> None:
        """Queue the jobs that a run has left: those who may be to blame alone, the others together before them.

        That is whoever was at work, or all if it happened in their turns.
        """
        if not run.folders:
            self._acquit(run)
            return
        suspects = run.folders if run.at is None else [folder for folder in run.folders if folder == run.at]
        innocent = [folder for folder in run.folders if folder not in suspects]
        self._trials += 1
        for folder in reversed(suspects):
            self._add([folder], run.beside, apart=True, first=True, trial=self._trials)
        if innocent:
            self._add(innocent, run.beside, apart=run.apart, first=True)

    def _acquit(self, run: _Run) -> None:
        """Let the other suspects of a trial take turns again, since one that was alone is to blame."""
        rest = [suspect for suspect in self._runs if run.trial and suspect.trial == run.trial]
        for suspect in rest:
            self._runs.remove(suspect)
        if rest:
            folders = [folder for suspect in rest for folder in suspect.folders]
            self._add(folders, run.beside, apart=len(folders) == 1, first=True)

    def _seconds_left(self) -> float | None:
        limit = self._limit_s()
        return None if limit is None else max(0.0, self._since + limit - time.monotonic())

    def _limit_s(self) -> float | None:
        limits = {"start": START_LIMIT_S, "profile": self.profiler_timeout_s}
        return limits.get(self._phase, self.timeout_s)

    def _died(self, process: WorkerProcess, run: _Run) -> None:
        """Find out why there will be no record, and remove the process. One of several jobs alone is charged."""
        began, timed_out = self._phase in ("job", "profile"), self._seconds_left() == 0.0
        code = process.exit_code(0.0 if timed_out else _END_S)
        words = "" if began else process.last_words()
        self._kill()
        self._runs.popleft()
        if not began or len(run.folders) == 1:
            charged = run.folders
        elif self._phase == "profile":
            # The others have no record yet.
            charged = [folder for folder in run.folders if folder == run.at]
        else:
            # One of several jobs is charged that was at work alone when the time was over, else none yet.
            charged = [folder for folder in run.folders if folder == run.at and timed_out and code is None]
        for folder in charged:
            self._outcomes[folder] = self._outcome(folder, code, words, timed_out=timed_out)
        run.folders = [folder for folder in run.folders if folder not in charged]
        self._broke_off(run)

    def _outcome(self, folder: Path, code: int | None, words: str, *, timed_out: bool) -> Outcome:
        """Return how a job ended whose process died in the present phase."""
        profiling = self._phase == "profile"
        if code is None and timed_out:
            what = {"start": "the worker's start", "profile": "profiling"}.get(self._phase, "the job")
            return Outcome(folder, "timeout", f"{what} took longer than {self._limit_s()} s and was killed", profiling)
        if code is None:
            reason = f"the worker stopped answering and was killed: {_see(folder / LOG_NAME)}"
            return Outcome(folder, "crashed", reason, profiling)
        when = {"job": "", "profile": " while profiling"}.get(self._phase, " before it took the job")
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return Outcome(folder, "out_of_memory", f"the kernel killed the worker for memory{when}", profiling)
        words = words or _see(folder / LOG_NAME)
        return Outcome(folder, "crashed", f"the worker {how_it_ended(code)}{when}: {words}", profiling)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process, self._sent = None, 0


def _word(line: str, run: _Run) -> tuple[str, Path | None] | None:
    """Return the word of the worker's message with the job that it is about, None for all of the run.

    None for what user code wrote into the pipe.
    """
    if line == "ready":
        return "ready", None
    about: list[tuple[str, Path | None]] = [(run.message, None)]
    about += [(json.dumps(folder), Path(folder)) for folder in json.loads(run.message)["folders"]]
    return next(((word, folder) for word in _PHASES for text, folder in about if line.endswith(f"{word} {text}")), None)


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
