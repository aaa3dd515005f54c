"""Tie the life of one process to that of another."""

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies for any reason (Linux, prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def end_with(process: int) -> None:
    """End this process when another one ends that is not its parent, as with a profiler's program between the two."""
    try:
        alive = os.pidfd_open(process)
    except ProcessLookupError:
        sys.exit(1)

    def watch() -> None:
        select.select([alive], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()
