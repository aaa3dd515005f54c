"""Background: the thread in which a tracker stores, beside the measuring and never in its way."""

import queue
import threading
import time
from collections.abc import Callable

# So many failures in a row mean a store that is gone, and so does one that took so long: each further item would cost
# the store's own time limit. It is then asked anew only after a pause, of which the asking is a small part.
_FAILURES_IN_A_ROW = 3
_LONG_S = 5.0
_PAUSE_S = 30.0
_PAUSE_PER_FAILURE = 10.0


class Background:
    """One daemon thread that runs tasks in order. An exception is kept, and the next task is still tried."""

    def __init__(self, name: str) -> None:
        self.errors: list[Exception] = []
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._in_a_row, self._next_try = 0, 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, store: Callable[[], object]) -> None:
        """Queue something to store; it is not tried while the store seems gone, or once it was given up."""
        self._tasks.put(lambda: self._try(store))

    def put_always(self, action: Callable[[], object]) -> None:
        """Queue an action that is tried whatever happened before."""
        self._tasks.put(lambda: self._keep(action))

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until all that is queued so far was tried; whether it was within the time."""
        done = threading.Event()
        self._tasks.put(done.set)
        return done.wait(timeout_s)

    def ask_again(self) -> None:
        """Try the next item even if the store seemed gone a moment ago."""
        self._tasks.put(self._end_pause)

    def give_up(self) -> None:
        """Skip what is still to be stored; actions are still tried."""
        self._given_up.set()

    def stop(self) -> None:
        """End the thread once it has come this far; does not wait."""
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
        # Whatever the store's libraries raise is no reason to end a sweep: it is told once, when the sweep is closed.
        try:
            action()
        except Exception as error:
            self.errors.append(error)
            return False
        return True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
