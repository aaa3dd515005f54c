"""A background thread that stores records while the next job is measured, and a limit on waiting for it."""

import math
import queue
import threading
import time
from collections.abc import Callable

# After so many failures in a row items are skipped for a while, since each may cost the store's own time limit.
_FAILURES_IN_A_ROW, _PAUSE_S = 3, 30.0
_STEP_S = 0.1


class Background:
    """One daemon thread that runs tasks in order. After an exception it tries the next task.

    The first and the last exception are kept in `errors`. An item of many requests calls `answered` after each.

    Args:
        name: the thread's name.
        patience_s: how long `settle` waits for one answer of the store. After that, items are skipped until
            `ask_again`. A store that answers is waited for as long as it takes.
    """

    def __init__(self, name: str, patience_s: float = math.inf) -> None:
        self.errors: list[Exception] = []
        self._patience_s = patience_s
        # When the store was last asked; None while the thread asks nothing of it.
        self._asked: float | None = None
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._given_up, self._silent = threading.Event(), threading.Event()
        self._in_a_row, self._next_try = 0, 0.0
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, store: Callable[[], object]) -> None:
        """Queue an item to store; it is skipped while the store is unreachable, or after `give_up`."""
        self._tasks.put(lambda: self._try(store))

    def put_always(self, action: Callable[[], object]) -> None:
        """Queue an action on the store that runs in any case."""
        self._tasks.put(lambda: self._timed(action))

    def put_own(self, action: Callable[[], object]) -> None:
        """Queue work of this process, such as an import: it runs in any case, and `settle` waits for it."""
        self._tasks.put(lambda: self._succeeds(action))

    def answered(self) -> None:
        """Count the time from now on, since the store has answered a part of the present item."""
        self._asked = time.monotonic()

    def settle(self, timeout_s: float = math.inf, each: Callable[[], object] = lambda: None) -> bool:
        """Wait until everything queued so far was tried, and return whether that was within limit and patience.

        `each` is called again and again while it waits.
        """
        done = threading.Event()
        self._tasks.put(done.set)
        limit = time.monotonic() + timeout_s
        while not done.wait(_STEP_S):
            each()
            now, asked = time.monotonic(), self._asked
            if asked is not None and now - asked > self._patience_s:
                self._silent.set()
            if now >= limit or self._silent.is_set():
                return False
        return True

    def ask_again(self) -> None:
        """Try the next item even if the store was unreachable, and wait for it a little."""
        self._silent.clear()
        self._next_try = 0.0
        # An item that waits since then gets as long again.
        self._asked = None if self._asked is None else time.monotonic()

    def give_up(self) -> None:
        """Skip items that are still queued; actions still run."""
        self._given_up.set()

    def stop(self) -> None:
        """End the thread after everything queued so far, without waiting for it."""
        self._tasks.put(None)

    def _try(self, store: Callable[[], object]) -> None:
        if self._given_up.is_set() or self._silent.is_set():
            return
        if self._in_a_row >= _FAILURES_IN_A_ROW and time.monotonic() < self._next_try:
            return
        self._in_a_row = 0 if self._timed(store) else self._in_a_row + 1
        self._next_try = time.monotonic() + _PAUSE_S

    def _timed(self, action: Callable[[], object]) -> bool:
        self._asked = time.monotonic()
        try:
            return self._succeeds(action)
        finally:
            self._asked = None

    def _succeeds(self, action: Callable[[], object]) -> bool:
        # No exception of the store's libraries ends a sweep: it is reported once, when the sweep ends.
        try:
            action()
        except Exception as error:
            self.errors[1:] = [error]
            return False
        return True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
