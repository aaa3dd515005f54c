"""Alarms and signal handlers of a whole process: what one job leaves must not strike the next."""

import contextlib
import ctypes
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# The system call timer_delete(2). glibc's function of that name takes a number of its own, which only the one who
# created the timer has.
_TIMER_DELETE = {"x86_64": 226, "aarch64": 111}


@dataclass(frozen=True)
class Signals:
    """The handlers, the blocked signals and the POSIX timers as they were; no alarm was set. For the main thread."""

    handlers: dict[int, Any]
    blocked: frozenset[int]
    timers: frozenset[int]

    @classmethod
    def now(cls) -> "Signals":
        """Return the present handlers and blocked signals."""
        # A handler that Python did not set is None, and cannot be set again.
        present = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {int(number): handler for number, handler in present.items() if handler is not None}
        return cls(handlers, frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))), _posix_timers())

    def restore(self) -> None:
        """Stop all alarms, and set back what was changed."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number in _posix_timers() - self.timers:
            ctypes.CDLL(None).syscall(_TIMER_DELETE[os.uname().machine], number)
        waiting = signal.sigpending()
        for number, handler in self.handlers.items():
            if signal.getsignal(number) != handler or number in waiting:
                # Ignored first, which drops a signal that waits: it would strike the next job.
                signal.signal(number, signal.SIG_IGN)
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def _posix_timers() -> frozenset[int]:
    """Return the kernel's numbers of this process's timers (timer_create(2)); none where they cannot be deleted."""
    listed = ""
    if os.uname().machine in _TIMER_DELETE:
        # A kernel without CONFIG_CHECKPOINT_RESTORE lists none.
        with contextlib.suppress(OSError):
            listed = Path("/proc/self/timers").read_text()
    return frozenset(map(int, re.findall(r"^ID: (\d+)$", listed, re.MULTILINE)))
