"""The CPU time of the processes below this one, and when these and other threads are quiet; on Linux."""

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from time import clock_gettime_ns

from attn_exp.core.process import descendants

_TASKS = Path("/proc/self/task")
# Others have ended their work if none runs, or waits for a processor, in two looks a few milliseconds apart.
_LOOK_S, _LOOKS = 0.002, 2


class Below:
    """The processes below this one: those that there are at each `look`, and all that have been waited for.

    The kernel counts the time of a process to the nanosecond, whatever its state, with that of all of its threads.
    """

    def __init__(self) -> None:
        self._processes: list[int] = []
        self.look()

    def look(self) -> None:
        """Look which processes there are, some 70 us."""
        self._processes = [process for process, _ in descendants(os.getpid())]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._processes)

    def ns(self) -> int:
        """Return the CPU time so far of all of them, in nanoseconds."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = int(1e9 * (ended.ru_utime + ended.ru_stime))
        for process in self._processes:
            # One that has been waited for meanwhile is among those that ended.
            with contextlib.suppress(OSError):
                spent += clock_gettime_ns(_clock_of(process))
        return spent

    def wait(self, longest_s: float, *, threads: bool) -> None:
        """Wait until none of them runs or could run, nor another thread of this process if `threads`."""
        quiet, ends, own = 0, time.perf_counter() + longest_s, str(threading.get_native_id())
        folders = [Path("/proc", str(process), "task") for process in self._processes] + [_TASKS] * threads
        while quiet < _LOOKS and time.perf_counter() < ends:
            time.sleep(_LOOK_S)
            running = any(state == "R" for folder in folders for task, state in _tasks(folder) if task != own)
            quiet = 0 if running else quiet + 1


def _clock_of(process: int) -> int:
    """Return the number of a process's CPU clock, as clock_getcpuclockid(3) does."""
    return ~process << 3 | 2


def _tasks(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the number and the state of each thread; none where the kernel does not tell."""
    for task in folder.glob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            # "2181 (python) S ...": proc_pid_stat(5). A name may contain spaces and parentheses.
            yield task.name, (task / "stat").read_text().rpartition(")")[2].split()[0]
