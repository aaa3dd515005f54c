"""Watch: the thread in which a sweep's parent listens to its tasks, and tells them that it lives."""

import threading
import time
from collections.abc import Callable

from attn_exp.launchers.board import Board, Line

_LOOK_S = 0.1
_BEAT_S = 1.0
# How long tasks that were told to stop may take to end.
_STOP_S = 3.0


class Watch:
    """Passes on each line that a task writes; `heard` answers whether the tasks are to go on."""

    def __init__(self, board: Board, tasks: int, heard: Callable[[Line], bool]) -> None:
        self._board, self._tasks, self._heard = board, tasks, heard
        self._over = threading.Event()
        self._greeted: set[int] = set()
        self._stopping = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="attn_exp watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell tasks to end at once, and wait until those that have begun did."""
        self._end()
        self._board.beat(stop=True)
        began = time.monotonic()
        while self._greeted and time.monotonic() - began < _STOP_S:
            time.sleep(_LOOK_S)
            self._listen()

    def close(self) -> None:
        """Hear what is left to hear. Raises what went wrong in listening."""
        self._end()
        self._board.beat(stop=True)
        self._listen()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        beaten = time.monotonic()
        while not self._over.wait(_LOOK_S):
            try:
                self._listen()
                if time.monotonic() - beaten > _BEAT_S:
                    self._board.beat(stop=self._stopping)
                    beaten = time.monotonic()
            except Exception as error:
                # Raised where the sweep waits, once the tasks that nobody hears have ended.
                self._error = error
                self._board.beat(stop=True)
                return

    def _listen(self) -> None:
        for line in self._board.lines(self._tasks):
            if line.word == "hello":
                self._greeted.add(line.task)
            elif line.word == "bye":
                self._greeted.discard(line.task)
            if not self._heard(line) and not self._stopping:
                self._stopping = True
                self._board.beat(stop=True)
