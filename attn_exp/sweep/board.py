"""Board: the folder in which a sweep's parent and its tasks, on whatever hosts, tell each other where they are.

The parent's file says that it lives and whether to stop; each task has a file of its own that it adds lines to; a group
is taken by making a file that was not there. All are opened anew for each look, and none is locked or renamed: this is
what network file systems keep in order (close-to-open consistency, and exclusive creation since NFS 3).
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.1
_BEAT_S = 1.0
# How long tasks that were told to stop may take to end.
_STOP_S = 3.0


# A parent that a task cannot see the process of, on another host, is gone after so long without a sign of life.
GONE_S = 60.0
_PARENT = "parent"
# How often a parent's file is read that has no whole line.
_READS, _READ_AGAIN_S = 10, 0.02


@dataclass(frozen=True)
class Line:
    """One line of a task: `hello HOST`, `wait GPU`, `begin JOB`, `end JOB`, `bye`."""

    task: int
    word: str
    rest: str


class Board:
    """The parent's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._beats = 0
        self._read: dict[int, int] = {}

    def open(self) -> None:
        """Make the folder; the parent lives."""
        self.folder.mkdir(parents=True)
        (self.folder / "groups").mkdir()
        self.beat()

    def beat(self, *, stop: bool = False) -> None:
        """Tell tasks that the parent lives, and with `stop` that they are to end at once.

        Raises:
            OSError: it cannot be written; to `stop`, which a missing file says too, there always is a way.
        """
        self._beats += 1
        word, path = "stop" if stop else "go", self.folder / _PARENT
        try:
            path.write_text(f"{word} {socket.gethostname()} {os.getpid()}:{_started(os.getpid())} {self._beats}\n")
        except OSError:
            path.unlink(missing_ok=True)
            if not stop:
                raise

    def lines(self, tasks: int) -> list[Line]:
        """What tasks have added since the last call, whole lines alone."""
        found = []
        refresh_folder(self.folder)
        for task in range(tasks):
            try:
                with _own(self.folder, task).open("rb") as file:
                    file.seek(self._read.get(task, 0))
                    whole, _, _ = file.read().rpartition(b"\n")
            except OSError:
                continue  # not there yet, or a file system that is away for a moment
            if whole:
                self._read[task] = self._read.get(task, 0) + len(whole) + 1
                for line in whole.decode().split("\n"):
                    word, _, rest = line.partition(" ")
                    found.append(Line(task, word, rest))
        return found


class TaskBoard:
    """A task's side."""

    def __init__(self, folder: Path, task: int) -> None:
        self._folder = folder
        self._task = task
        self._last, self._since = "", time.monotonic()

    def say(self, word: str, rest: str = "") -> None:
        """Add a line; if the folder is gone nobody is interested any more."""
        try:
            with _own(self._folder, self._task).open("a") as file:
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
        """Whether some task has this group."""
        return (self._folder / "groups" / str(group)).exists()

    def wanted(self) -> bool:
        """Whether the parent lives and wants this task to go on."""
        try:
            content = (self._folder / _PARENT).read_text()
        except FileNotFoundError:
            return False
        except OSError:
            content = ""  # a file system that is away for a moment
        now = time.monotonic()
        # Without a line's end it is being written, or whoever wrote it died over it: what was read before counts.
        if content.endswith("\n") and content != self._last:
            self._last, self._since = content, now
        return now - self._since < GONE_S and (not self._last or parent_is_alive(self._last))


def refresh_folder(folder: Path) -> None:
    """Let a network file system ask what is in a folder: it may hold for half a minute that a file is not there."""
    with contextlib.suppress(OSError):
        os.listdir(folder)


def parent_is_alive(content: str) -> bool:
    """Whether what a parent wrote means that it goes on, as far as can be known from this host."""
    word, host, process, _ = content.split()
    if word == "stop":
        return False
    if host != socket.gethostname():
        return True
    number, _, started = process.partition(":")
    return _started(int(number)) == started


def _started(process: int) -> str | None:
    """When a process of this host began, which its number alone does not tell: a restarted container counts anew.

    Clock ticks since the host's start; None if there is no such process, or it is dead and not yet waited for.
    """
    try:
        fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def running_elsewhere(folder: Path, watch_s: float) -> bool:
    """Whether the parent of this board is alive: here by its process, elsewhere if it beats within `watch_s`."""
    try:
        before = _whole(folder / _PARENT)
        if not before or not parent_is_alive(before):
            return False
        if before.split()[1] == socket.gethostname():
            return True
        time.sleep(watch_s)
        return _whole(folder / _PARENT) != before
    except FileNotFoundError:
        return False


def _whole(path: Path) -> str:
    """What a parent wrote last; empty if it died over it, and not because it is just writing."""
    for _ in range(_READS):
        content = path.read_text()
        if content.endswith("\n"):
            return content
        time.sleep(_READ_AGAIN_S)
    return ""


def _own(folder: Path, task: int) -> Path:
    return folder / f"task-{task}"


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
