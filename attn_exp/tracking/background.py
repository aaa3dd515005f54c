"""A background thread that stores records while the next job is measured."""

import queue
import threading
import time
from collections.abc import Callable

# After this many consecutive failures, or one that took this long, the store counts as unreachable, since each further
# item would cost the store's own time limit. It is tried again after a pause that is long compared with a try.
_FAILURES_IN_A_ROW = 3
_LONG_S = 5.0
_PAUSE_S = 30.0
_PAUSE_PER_FAILURE = 10.0


class Background:
    """One daemon thread that runs tasks in order. After an exception, which is kept, it tries the next task."""

    def __init__(self, name: str) -> None:
        self.errors: list[Exception] = []
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._in_a_row, self._next_try = 0, 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, store: Callable[[], object]) -> None:
        """Queue an item to store; it is skipped while the store is unreachable, or after `give_up`."""
        self._tasks.put(lambda: self._try(store))

    def put_always(self, action: Callable[[], object]) -> None:
        """Queue an action that runs in any case."""
        self._tasks.put(lambda: self._keep(action))

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued so far was tried, and return whether that was within the time limit."""
        done = threading.Event()
        self._tasks.put(done.set)
        return done.wait(timeout_s)

    def ask_again(self) -> None:
        """Try the next item even if the store was unreachable."""
        self._tasks.put(self._end_pause)

    def give_up(self) -> None:
        """Skip items that are still queued; actions still run."""
        self._given_up.set()

    def stop(self) -> None:
        """End the thread after everything queued so far, without waiting for it."""
        self._tasks.put(None)

    def _try(self, store: Callable[[], object]) -> None:
        if self._given_up.is_set():
            return
        if self._in_a_row >= _FAILURES_IN_A_ROW and time.monotonic() < self._next_try:
            return
        began = time.monotonic()
        if self._keep(store):
            self._in_a_row = 0
            return
        took_s = time.monotonic() - began
        self._in_a_row += _FAILURES_IN_A_ROW if took_s > _LONG_S else 1
        self._next_try = time.monotonic() + max(_PAUSE_S, took_s * _PAUSE_PER_FAILURE)

    def _end_pause(self) -> None:
        self._next_try = 0.0

    def _keep(self, action: Callable[[], object]) -> bool:
        # No exception of the store's libraries ends a sweep: it is reported once, when the sweep ends.
        try:
            action()
        except Exception as error:
            self.errors.append(error)
            return False
        return True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
