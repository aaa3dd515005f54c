"""The board: a folder over which a sweep's parent and its tasks, on any hosts, communicate.

The parent writes heartbeats, or a stop request, to one file. Each task appends lines to a file of its own. A task takes
a group of jobs by creating a file exclusively. Files are opened for each read, and none is locked or renamed: network
file systems guarantee only close-to-open consistency, and exclusive creation since NFS 3.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.1
_BEAT_S = 1.0
# How long tasks may take to end after a stop request.
_STOP_S = 3.0
# A parent is taken to be dead after so long without a heartbeat.
GONE_S = 60.0
_PARENT = "parent"


@dataclass(frozen=True)
class Line:
    """One message of a task: `hello HOST`, `wait GPU`, `held SENTENCE`, `begin JOB`, `end JOB` or `bye`."""

    task: int
    word: str
    rest: str


class Board:
    """The parent's side of the board."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._beats = 0
        self._read: dict[int, int] = {}

    def open(self) -> None:
        """Create the folder and write the first heartbeat."""
        self.folder.mkdir(parents=True)
        (self.folder / "groups").mkdir()
        self.beat()

    def beat(self, *, stop: bool = False) -> None:
        """Write a heartbeat, or with `stop` a request that tasks end at once; it never fails: no file means it too."""
        self._beats += 1
        word, path = "stop" if stop else "go", self.folder / _PARENT
        try:
            path.write_text(f"{word} {self._beats}\n")
        except OSError:
            path.unlink(missing_ok=True)
            if not stop:
                raise

    def lines(self, tasks: int) -> list[Line]:
        """Return the complete lines that tasks have appended since the last call."""
        lines = []
        refresh_folder(self.folder)
        for task in range(tasks):
            try:
                with (self.folder / f"task-{task}").open("rb") as file:
                    file.seek(self._read.get(task, 0))
                    whole, _, _ = file.read().rpartition(b"\n")
            except OSError:
                continue  # it does not exist yet, or the file system is temporarily unavailable
            if whole:
                self._read[task] = self._read.get(task, 0) + len(whole) + 1
                for line in whole.decode().split("\n"):
                    word, _, rest = line.partition(" ")
                    lines.append(Line(task, word, rest))
        return lines


class TaskBoard:
    """A task's side of the board."""

    def __init__(self, folder: Path, task: int) -> None:
        self._folder = folder
        self._task = task
        self._last, self._since = "", time.monotonic()

    def append(self, word: str, rest: str = "") -> None:
        """Append a line, unless the folder is gone, which means that the parent has ended."""
        try:
            with (self._folder / f"task-{self._task}").open("a") as file:
                file.write(f"{word} {rest}\n")
        except FileNotFoundError:
            return

    def take(self, group: int) -> bool:
        """Take a group of jobs; False if another task has it."""
        try:
            os.close(os.open(self._folder / "groups" / str(group), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def taken(self, group: int) -> bool:
        """Return whether a task has taken this group."""
        return (self._folder / "groups" / str(group)).exists()

    def should_continue(self) -> bool:
        """Return whether the parent is alive and has not requested a stop."""
        try:
            content = (self._folder / _PARENT).read_text()
        except FileNotFoundError:
            return False
        except OSError:
            content = ""  # the file system is temporarily unavailable
        now = time.monotonic()
        # An incomplete line is still being written, or its writer died: the previous line counts.
        if content.endswith("\n") and content != self._last:
            self._last, self._since = content, now
        return now - self._since < GONE_S and not self._last.startswith("stop")


def refresh_folder(folder: Path) -> None:
    """List a folder to invalidate a network file system's cache of missing files."""
    with contextlib.suppress(OSError):
        os.listdir(folder)


def running_elsewhere(folder: Path, watch_s: float) -> bool:
    """Return whether this board's parent is alive: whether it writes a heartbeat within `watch_s`."""
    try:
        before = (folder / _PARENT).read_text()
        if before.startswith("stop"):
            return False
        time.sleep(watch_s)
        return (folder / _PARENT).read_text() != before
    except FileNotFoundError:
        return False


class Watch:
    """A thread that calls `handle` with each line of a task, and requests a stop as soon as it returns false."""

    def __init__(self, board: Board, tasks: int, handle: Callable[[Line], bool]) -> None:
        self._board, self._tasks, self._handle = board, tasks, handle
        self._closed = threading.Event()
        self._active_tasks: set[int] = set()
        self._stopping = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="attn_exp watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell tasks to end at once, and wait for those that run."""
        self._end()
        began = time.monotonic()
        while self._active_tasks and time.monotonic() - began < _STOP_S:
            time.sleep(_POLL_S)
            self._listen()

    def close(self) -> None:
        """Handle the remaining lines. Raises the error that ended the thread, if one did."""
        self._end()
        self._listen()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        self._closed.set()
        self._thread.join()
        self._board.beat(stop=True)

    def _run(self) -> None:
        beaten = time.monotonic()
        while not self._closed.wait(_POLL_S):
            try:
                self._listen()
                if time.monotonic() - beaten > _BEAT_S:
                    self._board.beat(stop=self._stopping)
                    beaten = time.monotonic()
            except Exception as error:
                # `close` raises it, after the tasks have ended.
                self._error = error
                self._board.beat(stop=True)
                return

    def _listen(self) -> None:
        for line in self._board.lines(self._tasks):
            if line.word == "hello":
                self._active_tasks.add(line.task)
            elif line.word == "bye":
                self._active_tasks.discard(line.task)
            if not self._handle(line) and not self._stopping:
                self._stopping = True
                self._board.beat(stop=True)
