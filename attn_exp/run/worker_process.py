"""Isolation: run jobs in a worker process, and find out how a job ended if the worker could not write its record."""

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Protocol

from attn_exp.core.errors import UserError, how_it_ended, last_message
from attn_exp.core.files import cut_middle, rewrite
from attn_exp.core.process import descendants, guarded, kill_all, kill_marked, kill_orphans, own_mark
from attn_exp.core.record_file import LOG_NAME
from attn_exp.core.redaction import is_secret, without_secrets
from attn_exp.core.status import Status

_NAMES = (
    *("PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "COLUMNS"),
    *("TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_STATE_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "CC", "CXX"),
)
# Grouped by reader: CUDA and its tools, torch and its compilers, kernel packages, CPU libraries, Python.
_PREFIXES = (
    *("CUDA", "CUDNN", "CUBLAS", "CUTLASS_", "CUTE_", "NVIDIA_", "NV_", "NVTX_", "NVTE_", "NCCL_", "NSYS_", "KINETO_"),
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "HELION_", "XFORMERS_", "FLASH_ATTENTION_", "FLASH_ATTN_"),
    *("OMP_", "GOMP_", "KMP_", "MKL", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "ASAN_", "LC_", "PYTHON"),
    "ATTN_EXP",
)
# Names the worker in its environment, which its children inherit.
_MARK = "ATTN_EXP_WORKER"
_PATTERN = re.compile(r"[A-Za-z_*?][A-Za-z0-9_*?]*")
START_LIMIT_S = 300.0
# A reply is a word and a path.
_LONGEST_REPLY = 1 << 16
# Of a job's log its beginning and end are kept, so many bytes in all.
LOG_BYTES = 16 << 20
# The worker's phase after each of its messages; it sends `profile` before each profiler.
_PHASES = {"begin": "job", "profile": "profile", "end": "idle", "poisoned": "idle", "outdated": "idle"}
# The module that runs as the worker process.
WORKER = "attn_exp.worker"


def worker_variables(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a worker gets: those that computing needs, and those that `more` names.

    A needed variable whose name sounds like a secret is left out, unless `more` names it.

    Args:
        environ: the environment.
        more: names and patterns, in which `*` is any text.
    """
    return {name: value for name, value in environ.items() if _needed(name) or _named(name, more)}


def check_patterns(given: Any) -> tuple[str, ...]:
    """Return the names and patterns of `isolation.variables`. Raises UserError for one that cannot name a variable."""
    names = [given] if isinstance(given, str) else given or []
    for name in names if isinstance(names, (list, tuple)) else [names]:
        if not isinstance(name, str) or not _PATTERN.fullmatch(name):
            raise UserError(f"isolation.variables={name} names no variable: write isolation.variables=[MY_NAME,HF_*]")
    return tuple(names)


def _needed(name: str) -> bool:
    return (name in _NAMES or name.startswith(_PREFIXES)) and not is_secret(name)


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        folder: the job's folder.
        status: None if the worker wrote the record itself, as is `reason`.
        profiling: whether a profiler failed; the record of the timing exists then.
    """

    folder: Path
    status: Status | None = None
    reason: str | None = None
    profiling: bool = False


class Isolation(Protocol):
    """Where jobs run. Several may be submitted; `wait` waits for the oldest."""

    def start(self) -> None:
        """Start before the first job is known."""
        ...

    def submit(self, folder: Path) -> None:
        """Queue the job in `folder`."""
        ...

    def wait(self) -> Outcome:
        """Wait until the oldest job has ended."""
        ...

    def close(self) -> None:
        """End at once, killing running jobs; leave no process behind."""
        ...


class Worker:
    """A worker process in a process group of its own.

    Args:
        reuse: whether one process runs all jobs.
        timeout_s: how long a job may take.
        profiler_timeout_s: how long each profiler may take.
        variables: names and patterns of environment variables that it gets besides those that computing needs.
    """

    def __init__(
        self,
        *,
        reuse: bool,
        timeout_s: float | None,
        profiler_timeout_s: float | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        self.reuse = reuse
        self.timeout_s = timeout_s
        self.profiler_timeout_s = profiler_timeout_s
        self.variables = tuple(variables)
        self._pending: deque[Path] = deque()
        self._sent = 0
        # How many jobs the process has ended.
        self._served = 0
        # The phase is `start`, `idle`, `job` or `profile`; time limits count from its beginning.
        self._phase = "start"
        self._since = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        # What came of the process, as last seen.
        self._below: set[tuple[int, str]] = set()
        self._replies = -1
        self._pidfd = -1
        self._startup: IO[bytes] | None = None
        self._buffer = b""
        self._oom_kills = 0

    def takes(self, other: "Worker") -> bool:
        """Return whether a worker that was started with the options of `other` can be used instead of this one."""
        return self.reuse and other.reuse and self.variables == other.variables

    def start(self) -> None:
        """Start the process; it imports torch while the parent goes on."""
        if self._process is not None:
            return
        self._replies, reply_fd = os.pipe()
        os.set_inheritable(reply_fd, True)
        self._startup = tempfile.TemporaryFile()  # noqa: SIM115
        self._mark = own_mark()
        command = [sys.executable, "-m", WORKER, "--serve", "--reply-fd", str(reply_fd)]
        self._process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._startup,
            pass_fds=[reply_fd],
            env=worker_variables(os.environ, self.variables) | {_MARK: self._mark},
            start_new_session=True,
        )
        os.close(reply_fd)
        # Daemons of a worker whose parent was killed: they would go on using the device.
        kill_orphans(_MARK)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._buffer, self._sent, self._served = b"", 0, 0
        self._since, self._phase = time.monotonic(), "start"
        self._oom_kills = _oom_kills()

    def submit(self, folder: Path) -> None:
        """Queue a job's folder."""
        self._pending.append(folder)
        self.start()
        self._send()

    def wait(self) -> Outcome:
        """Wait for the oldest job: until it has a record, the worker dies, or the time limit is over."""
        outcome = self._ended()
        cut_middle(outcome.folder / LOG_NAME, LOG_BYTES)
        # What a worker was told in secret, it may print.
        rewrite(outcome.folder / LOG_NAME, without_secrets)
        return outcome

    def _ended(self) -> Outcome:
        folder = self._pending[0]
        if self._phase == "idle":
            self._since = time.monotonic()
        while True:
            self.start()
            self._send()
            line = self._reply()
            self._look_below()
            if line is None and self._served and self._phase == "idle":
                # It ended between two jobs, through what the last one left behind: the next one is not to blame.
                self._kill()
                continue
            if line is None:
                return self._failed_outcome(folder)
            if (word := _word(line, folder)) is None:
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

    def close(self) -> None:
        """Kill the process group and drop queued jobs."""
        self._pending.clear()
        self._kill()

    def interrupt(self) -> None:
        """Kill the process at once. May be called from another thread than `wait`, which then returns."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _send(self) -> None:
        """Send the worker the folders of all queued jobs, or only the first one if it is not reused."""
        assert self._process is not None and self._process.stdin is not None
        ahead = len(self._pending) if self.reuse else min(1, len(self._pending))
        while self._sent < ahead:
            try:
                self._process.stdin.write(f"{json.dumps(str(self._pending[self._sent]))}\n".encode())
                self._process.stdin.flush()
            except BrokenPipeError:
                return  # it is dead, as `wait` will notice
            self._sent += 1

    def _reply(self) -> str | None:
        """Return the worker's next line, or None if it died or ran out of time. Sleeps; polling would burn a core."""
        while b"\n" not in self._buffer:
            with selectors.DefaultSelector() as selector:
                selector.register(self._replies, selectors.EVENT_READ)
                selector.register(self._pidfd, selectors.EVENT_READ)
                ready = {key.fd for key, _ in selector.select(self._seconds_left())}
            if self._replies in ready:
                chunk = os.read(self._replies, 4096)
                # User code may write into the pipe too, and without end.
                self._buffer = (self._buffer + chunk)[-_LONGEST_REPLY:]
                if chunk:
                    continue
            # Its last message, if any, has been read by now.
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def _seconds_left(self) -> float | None:
        limit = self._limit_s()
        return None if limit is None else max(0.0, self._since + limit - time.monotonic())

    def _limit_s(self) -> float | None:
        """The time limit of the present phase."""
        own = {"start": START_LIMIT_S, "profile": self.profiler_timeout_s}
        return own.get(self._phase, self.timeout_s)

    def _failed_outcome(self, folder: Path) -> Outcome:
        """Find out why there will be no record, and remove the process."""
        assert self._process is not None
        phase, limit, timed_out = self._phase, self._limit_s(), self._timed_out()
        began, profiling = phase in ("job", "profile"), phase == "profile"
        code = self._exit_code()
        words = "" if began else self._last_words()
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

    def _last_words(self) -> str:
        """Return the last line that a worker printed before it had a job, and with it a log."""
        if self._startup is None:
            return ""
        self._startup.seek(0)
        return last_message(self._startup.read().decode(errors="replace"))

    def _exit_code(self) -> int | None:
        """Return the exit code, or None if the process still runs; its pipe may close a moment before it ends."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=0.0 if self._timed_out() else 5.0)
        except subprocess.TimeoutExpired:
            return None

    def _timed_out(self) -> bool:
        left = self._seconds_left()
        return left is not None and left <= 0

    def _look_below(self) -> None:
        """Note what has come of the process: if it ends by itself, nothing says any more what was below it."""
        assert self._process is not None
        self._below |= descendants(self._process.pid)

    def _kill(self) -> None:
        if self._process is None:
            return
        self._look_below()
        # The whole group, with compilers and other children of the job; SIGKILL, since SIGTERM can be ignored.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # And those that have left it: a daemon would go on using the device, beside whatever is measured next.
        kill_marked(_MARK, self._mark)
        kill_all(self._below)
        self._below = set()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        os.close(self._replies)
        os.close(self._pidfd)
        if self._startup is not None:
            self._startup.close()
        self._process, self._sent = None, 0


def _word(line: str, folder: Path) -> str | None:
    """Return the word of the worker's message about a job, or `ready`; None for what user code wrote into the pipe.

    Such words may also stand before a message, on its line.
    """
    job = json.dumps(str(folder))
    return "ready" if line == "ready" else next((word for word in _PHASES if line.endswith(f"{word} {job}")), None)


# Measures the job in a folder on the device that an earlier call returned (None at first), and returns that device.
RunFolder = Callable[[Path, Any], Any]


class InProcess:
    """No isolation: jobs run here, for debugging.

    Args:
        run_folder: the worker's own function, which imports torch into this process.
    """

    def __init__(self, run_folder: RunFolder) -> None:
        self._pending: deque[Path] = deque()
        self._run_folder = run_folder
        self._device: Any = None

    def start(self) -> None:
        """Do nothing."""

    def submit(self, folder: Path) -> None:
        """Queue a job's folder."""
        self._pending.append(folder)

    def wait(self) -> Outcome:
        """Run the oldest job."""
        folder = self._pending.popleft()
        self._device = self._run_folder(folder, self._device)
        return Outcome(folder)

    def close(self) -> None:
        """Drop queued jobs."""
        self._pending.clear()


def make_isolation(config: Mapping[str, Any], run_folder: RunFolder | None = None) -> Isolation:
    """Return the isolation that a configuration asks for.

    Args:
        config: the options of `isolation`, and `profiler_timeout_s`, which is what each profiler may take.
        run_folder: measures jobs in this process, for `isolation=none`; None where that cannot be.

    Raises:
        UserError: there is no such isolation, or a time limit or a name of a variable is invalid.
    """
    timeout_s = _limit("isolation.timeout_s", config.get("timeout_s"))
    profiler_timeout_s = _limit("profiler_timeout_s", config.get("profiler_timeout_s"))
    name = config.get("name")
    if name == "none":
        if run_folder is None:
            raise UserError("isolation=none is not possible here: leave it out, or choose isolation=fresh")
        return InProcess(run_folder)
    if name not in ("warm", "fresh"):
        raise UserError(f"isolation {name!r} is none of warm, fresh, none")
    return Worker(
        reuse=name == "warm",
        timeout_s=timeout_s,
        profiler_timeout_s=profiler_timeout_s,
        variables=check_patterns(config.get("variables")),
    )


def _limit(key: str, seconds: Any) -> float | None:
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (number and seconds > 0):
        raise UserError(f"{key}={seconds} is not a positive number of seconds")
    limit: float | None = seconds
    return limit


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for memory in this control group, or else on this machine."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        counts = [int(line.split()[1]) for line in lines if line.split()[0] == key]
        if counts:
            return counts[0]
    return 0


def _see(log: Path) -> str:
    """Return where a job's last words are, if it left any."""
    try:
        return f"see {log}" if log.stat().st_size else "it printed nothing"
    except OSError:
        return "it printed nothing"
