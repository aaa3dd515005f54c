"""A background thread that stores records while the next job is measured, and a limit on waiting for it."""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

# After this many consecutive failures, or one that took this long, the store counts as unreachable, since each further
# item would cost the store's own time limit. It is tried again after a pause that is long compared with a try.
_FAILURES_IN_A_ROW = 3
_LONG_S = 5.0
_PAUSE_S = 30.0
_PAUSE_PER_FAILURE = 10.0
# A store that answers takes milliseconds for an item: one that takes longer than this, or fails, counts as waiting.
_FREE_S = 1.0
# The same for a part of an item that has more of them the more jobs there are: a request or two.
_FREE_PART_S = 0.3
# What is left of the patience for `ask_again`, in case the store is back.
_LAST_SHARE = 0.2
# Work of our own counts up to this share of the patience: on a busy machine it would take all, and no store were tried.
_OWN_SHARE = 0.4
_STEP_S = 0.1


class Background:
    """One daemon thread that runs tasks in order. After an exception it tries the next task.

    The first and the last exception are kept in `errors`: each may quote a whole answer of a server.

    An item that has parts, of which the number grows with that of jobs, calls `answered` after each of them.

    Args:
        name: the thread's.
        patience_s: how long `settle` waits in all for work of our own, up to two fifths of it, and for items that take
            longer than a second each or fail. After four fifths of it, it waits no more, and items are skipped until
            `ask_again`. While the thread waits for a processor with an item, as on a busy machine, no time counts: the
            store does not see the item then.
    """

    def __init__(self, name: str, patience_s: float = math.inf) -> None:
        self.errors: list[Exception] = []
        self._last_s = 0.0 if patience_s == math.inf else _LAST_SHARE * patience_s
        self._patience_s = patience_s - self._last_s
        self._own_left_s = _OWN_SHARE * patience_s
        self._is_own = False  # whether work of our own is being done
        # When the item that is being stored was begun, by `_clock`; None if the thread does not wait for the store.
        # What `settle` has waited for it is counted when it is known that it is not free.
        self._began: float | None = None
        self._uncounted_s = 0.0
        self._count = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._in_a_row, self._next_try = 0, 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, store: Callable[[], object]) -> None:
        """Queue an item to store; it is skipped while the store is unreachable, or after `give_up`."""
        self._tasks.put(lambda: self._try(store))

    def put_always(self, action: Callable[[], object]) -> None:
        """Queue an action on the store that runs in any case."""
        self._tasks.put(lambda: self._timed(action))

    def put_own(self, action: Callable[[], object]) -> None:
        """Queue work of this process, such as an import: it runs in any case, and `settle` waits for it."""
        self._tasks.put(lambda: self._ours(action))

    def answered(self) -> None:
        """Count what follows in the present item apart from what came before, which the store has answered."""
        with self._count:
            if self._began is not None:
                now = self._clock()
                if now - self._began > _FREE_PART_S:
                    self._pay()
                self._began, self._uncounted_s = now, 0.0

    def settle(self, timeout_s: float | None = None, kept_s: float = 0.0) -> bool:
        """Wait until everything queued so far was tried, and return whether that was within limit and patience.

        Args:
            timeout_s: the limit.
            kept_s: how much of the patience is kept for later calls.
        """
        done = threading.Event()
        self._tasks.put(done.set)
        limit = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not done.is_set():
            began, before = time.monotonic(), self._clock()
            left = limit - began
            if left <= 0 or self._patience_s <= kept_s:
                return False
            if done.wait(min(_STEP_S, left)):
                break
            with self._count:
                if self._began is not None:
                    now = self._clock()
                    self._uncounted_s += now - max(before, self._began)
                    if now - self._began > _FREE_S:
                        self._pay()
                elif self._is_own:
                    own_s = min(time.monotonic() - began, self._own_left_s)
                    self._own_left_s -= own_s
                    self._patience_s -= own_s
        return True

    def ask_again(self) -> None:
        """Try the next item even if the store was unreachable, and wait for it a little."""
        with self._count:
            self._patience_s, self._last_s = max(0.0, self._patience_s) + self._last_s, 0.0
        self._tasks.put(self._end_pause)

    def give_up(self) -> None:
        """Skip items that are still queued; actions still run."""
        self._given_up.set()

    def stop(self) -> None:
        """End the thread after everything queued so far, without waiting for it."""
        self._tasks.put(None)

    def _try(self, store: Callable[[], object]) -> None:
        if self._given_up.is_set() or self._patience_s <= 0:
            return
        if self._in_a_row >= _FAILURES_IN_A_ROW and time.monotonic() < self._next_try:
            return
        began = self._clock()
        if self._timed(store):
            self._in_a_row = 0
            return
        took_s = self._clock() - began
        self._in_a_row += _FAILURES_IN_A_ROW if took_s > _LONG_S else 1
        self._next_try = time.monotonic() + max(_PAUSE_S, took_s * _PAUSE_PER_FAILURE)

    def _timed(self, action: Callable[[], object]) -> bool:
        self._began = self._clock()
        stored = self._keep(action)
        with self._count:
            self._began = None
            if not stored:
                self._pay()
            self._uncounted_s = 0.0
        return stored

    def _ours(self, action: Callable[[], object]) -> None:
        self._is_own = True
        self._keep(action)
        self._is_own = False

    def _clock(self) -> float:
        """Return the seconds of a clock that stands still while the thread waits for a processor."""
        return time.monotonic() - _queued_s(self._thread.native_id)

    def _pay(self) -> None:
        self._patience_s -= self._uncounted_s
        self._uncounted_s = 0.0

    def _end_pause(self) -> None:
        self._next_try = 0.0

    def _keep(self, action: Callable[[], object]) -> bool:
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


def _queued_s(thread: int | None) -> float:
    """Return how long a thread of this process has waited for a processor so far; 0 if the kernel does not count it."""
    # "time spent waiting on a runqueue (in ns)": https://docs.kernel.org/scheduler/sched-stats.html
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) * 1e-9
    return 0.0
