"""Tie the life of one process to that of another, bound its memory, and stop its looking for garbage.

`python process.py PARENT COMMAND...` is `guard`: this file needs no package but Python's own.
"""

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# When to look again for processes that were started meanwhile or have not ended yet: a second in all, since one that
# waits for a device may never end.
_AGAIN_AFTER_S = tuple(0.001 * 2**turn for turn in range(10))


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies for any reason (Linux, prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(1)


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` below `guard`, with this process as the parent.

    `command` is run with `--parent` and the guard's number as its last arguments, and calls `die_with_parent`.
    """
    return [sys.executable, "-P", "-S", __file__, str(os.getpid()), *command]


def guard(parent: int, command: Sequence[str]) -> NoReturn:
    """Run a command and end as it does; when it or `parent` ends, kill all of its descendants.

    A process that crashed leaves no record of its descendants. So this process stands between it and its parent, and
    the kernel makes it the parent of all orphans (Linux, prctl(2)), daemons included.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: _end_below(-signal.SIGTERM))
    die_with_parent(parent, signal.SIGTERM)
    # Python ignores the first two, and a new process would, too.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM]
    child = os.posix_spawn(command[0], [*command, "--parent", str(os.getpid())], os.environ, setsigdef=defaults)
    # The parent sees by the ends of pipes that the command has ended. Not by `os.closerange`, for which a Python that
    # was built without close_range(2) tries every number up to the limit: 10^9 in some containers.
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.close(int(number))
    ended, status = 0, 0
    while ended != child:
        ended, status = os.wait()
    _end_below(os.waitstatus_to_exitcode(status))


def _end_below(code: int) -> NoReturn:
    """Kill all processes below this one, and end with an exit code, or by a signal if it is negative."""
    kill_all(descendants(os.getpid()))
    if code < 0:
        # The command has dumped its memory, if it was to.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def end_with(process: int) -> None:
    """End this process when another one ends that is not its parent, as with a profiler's program between the two."""
    from attn_exp.core.host.lacking import end_of_process

    started = _started(process)
    try:
        ended = end_of_process(process)
    except ProcessLookupError:
        sys.exit(1)

    def watch() -> None:
        if ended is not None:
            select.select([ended], [], [])
        while ended is None and started and _started(process) == started:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()


def limit_memory() -> None:
    """Make an allocation beyond the machine's memory fail here, before the kernel kills some process for it."""
    taken = 1024 * _kilobytes("/proc/self/status", "VmData")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = taken + available_bytes() * 9 // 10
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def available_bytes() -> int:
    """Return how much memory a process may still take here, in bytes."""
    return 1024 * _kilobytes("/proc/meminfo", "MemAvailable")


def memory_of_others() -> tuple[int, int]:
    """Return how many bytes of this machine's memory others than this process have taken, and how many there are."""
    total = 1024 * _kilobytes("/proc/meminfo", "MemTotal")
    return max(0, total - available_bytes() - 1024 * _kilobytes("/proc/self/status", "VmRSS")), total


def _kilobytes(path: str, key: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def prefer_to_be_killed() -> None:
    """Make the kernel prefer this process to its parent when it kills for memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def descendants(pid: int) -> set[tuple[int, str]]:
    """Return the processes below one, each with the moment of its start: another one may get its number later."""
    found: set[tuple[int, str]] = set()
    left = [pid]
    while left:
        below = {(child, _started(child)) for child in _children(left.pop())}
        left += [child for child, _ in below - found]
        found |= below
    return found


def _children(pid: int) -> list[int]:
    """Return the numbers of a process's children, also where the kernel lists none (CONFIG_PROC_CHILDREN)."""
    if not Path("/proc/self/task", str(os.getpid()), "children").exists():
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [number for number in numbers if _stat(number)[1:2] == [str(pid).encode()]]
    children: list[int] = []
    for path in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    return children


def kill_all(processes: set[tuple[int, str]]) -> None:
    """Kill processes as `descendants` returns them, with what has come of them since, and wait for their end.

    One that is still being taken apart holds its memory, that of a GPU too.
    """
    for after_s in _AGAIN_AFTER_S:
        processes = {process for process in processes if process[1] and _started(process[0]) == process[1]}
        if not processes:
            return
        processes = processes.union(*(descendants(pid) for pid, _ in processes))
        for pid, _ in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(after_s)


def pid_namespace() -> str:
    """Return what names the namespace of this process's number: containers of one host name may have several."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process started, in clock ticks since the machine did; empty if there is none, or it has ended."""
    fields = _stat(pid)
    # The third and the 22nd of proc(5); a zombie has ended.
    return "" if not fields or fields[0] == b"Z" else fields[19].decode()


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process from the third one of proc(5) on, none if it is gone."""
    try:
        return Path("/proc", str(pid), "stat").read_bytes().rsplit(b")", 1)[1].split()
    except OSError:
        return []


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disable the garbage collector for a while; what it was set to is restored."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2:])
