"""Alarms and signal handlers of a whole process: what one job leaves must not strike the next."""

import signal
from dataclasses import dataclass
from typing import Any

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass(frozen=True)
class Signals:
    """The handlers and the blocked signals as they were; no alarm was set. For the main thread."""

    handlers: dict[int, Any]
    blocked: frozenset[int]

    @classmethod
    def now(cls) -> "Signals":
        """Return the present handlers and blocked signals."""
        # A handler that Python did not set is None, and cannot be set again.
        present = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {int(number): handler for number, handler in present.items() if handler is not None}
        return cls(handlers, frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))

    def restore(self) -> None:
        """Stop all alarms, and set back what was changed."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        waiting = signal.sigpending()
        for number, handler in self.handlers.items():
            if signal.getsignal(number) != handler or number in waiting:
                # Ignored first, which drops a signal that waits: it would strike the next job.
                signal.signal(number, signal.SIG_IGN)
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
