"""One worker process: its start, its messages, and its end together with all that has come of it."""

import contextlib
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError, last_message
from attn_exp.core.host.lacking import end_of_process
from attn_exp.core.host.process import descendants, guarded, kill_all
from attn_exp.core.redaction import is_secret

PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
# The module that runs as the worker process.
WORKER = "attn_exp.worker"
# A message is a word and the paths of all jobs of a case.
_LONGEST_MESSAGE = 1 << 20
# The interval for systems that do not tell that a process has ended.
_LOOK_AGAIN_S = 0.1
# The environment variables that a worker gets.
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
_PATTERN = re.compile(r"[A-Za-z_*?][A-Za-z0-9_*?]*")


class WorkerProcess:
    """A process in a group of its own, which imports torch while the parent goes on.

    `variables` are names and patterns of environment variables that it gets besides those that computing needs.
    """

    def __init__(self, variables: Sequence[str] = (), python: str = sys.executable) -> None:
        self._replies, reply_fd = os.pipe()
        os.set_inheritable(reply_fd, True)
        # The output of the process before it has a job, and with it a log.
        self._startup = tempfile.TemporaryFile()  # noqa: SIM115
        # The worker adds the current folder itself, as the last one: files there hide no module.
        command = [python, "-P", "-m", WORKER, "--serve", "--reply-fd", str(reply_fd)]
        self._process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._startup,
            pass_fds=[reply_fd],
            env=_importing(worker_variables(os.environ, variables)),
            start_new_session=True,
        )
        os.close(reply_fd)
        self.pid = self._process.pid
        self._ended = end_of_process(self.pid)
        self._buffer = b""

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
        until = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            if self._replied(None if until is None else max(0.0, until - time.monotonic())):
                chunk = os.read(self._replies, 4096)
                # User code may write into the pipe too, and without end.
                self._buffer = (self._buffer + chunk)[-_LONGEST_MESSAGE:]
                if chunk:
                    continue
            # Its last message, if any, has been read by now.
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def _replied(self, limit_s: float | None) -> bool:
        """Wait until there is a reply, the process has ended, or the limit is over; return whether there is one."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            if self._ended is not None:
                selector.register(self._ended, selectors.EVENT_READ)
                return self._replies in {key.fd for key, _ in selector.select(limit_s)}
            until = math.inf if limit_s is None else time.monotonic() + limit_s
            while not selector.select(_LOOK_AGAIN_S):
                if self._process.poll() is not None or time.monotonic() > until:
                    return bool(selector.select(0))
            return True

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
        below = descendants(self.pid)
        # The whole group, with compilers and other children of the job; SIGKILL, since SIGTERM can be ignored.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        # And those that have left it: a daemon would go on using the device, beside whatever is measured next.
        kill_all(below)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._replies)
        if self._ended is not None:
            os.close(self._ended)
        self._startup.close()


def _importing(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables with this package on the path, if it was found in the current folder."""
    if Path.cwd() != PACKAGE_FOLDER:
        return variables
    given = variables.get("PYTHONPATH")
    return variables | {"PYTHONPATH": os.pathsep.join([*([given] if given else []), str(PACKAGE_FOLDER)])}


def worker_variables(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a worker gets: those that computing needs, and those that `more` names.

    A needed variable whose name sounds like a secret is left out, unless `more` names it. In a pattern `*` is any text.
    """
    return {
        name: value
        for name, value in environ.items()
        if ((name in _NAMES or name.startswith(_PREFIXES)) and not is_secret(name))
        or any(fnmatchcase(name, pattern) for pattern in more)
    }


def check_patterns(given: Any) -> tuple[str, ...]:
    """Return the names and patterns of `isolation.variables`. Raises UserError for one that cannot name a variable."""
    names = [given] if isinstance(given, str) else given or []
    for name in names if isinstance(names, (list, tuple)) else [names]:
        if not isinstance(name, str) or not _PATTERN.fullmatch(name):
            raise UserError(f"isolation.variables={name} names no variable: write isolation.variables=[MY_NAME,HF_*]")
    return tuple(names)
