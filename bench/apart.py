"""Tasks in forked processes, so that a crash or a hang costs one task, and what was said before it is kept."""

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Generic, TypeVar

from attn_exp.core.errors import how_it_ended
from attn_exp.core.host.process import die_with_parent, prefer_to_be_killed

T = TypeVar("T")
_OVER = "a task is over"


@dataclass(frozen=True)
class Ended:
    """The last word on a task whose process died or was silent for too long: how it ended."""

    how: str


@dataclass
class _Worker(Generic[T]):
    """A process, and what it is at."""

    process: ForkProcess
    pipe: Connection
    task: T | None = None
    heard: float = field(default_factory=time.monotonic)

    def end(self) -> str:
        """End the process and those that it started; return how it ended."""
        # One that has died keeps its own exit code.
        self.process.join(0.2)
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return how_it_ended(self.process.exitcode or 0)


class Apart(Generic[T]):
    """Processes that work at tasks, forked from this one, which must not have used a GPU.

    Args:
        work: yields what it has to say of a task, in a forked process. An error that it raises ends the process.
        processes: so many at most.
        silence_s: a process that says nothing for so long is killed.
        renewed: whether each task gets a process of its own.
    """

    def __init__(
        self, work: Callable[[T], Iterator[Any]], processes: int, silence_s: float, *, renewed: bool = False
    ) -> None:
        self._work, self._most, self._silence_s, self._renewed = work, processes, silence_s, renewed
        self._workers: list[_Worker[T]] = []

    def run(self, tasks: deque[T], until: float) -> Iterator[tuple[T, Any]]:
        """Yield what is said of the tasks, and `Ended` for one whose process ended, until `until` (`time.monotonic`).

        The caller may put tasks back into `tasks` meanwhile. What is under way at `until` is killed without a word.
        """
        try:
            while time.monotonic() < until:
                self._hand_out(tasks)
                busy = [worker for worker in self._workers if worker.task is not None]
                if not busy:
                    return
                silent = min(worker.heard for worker in busy) + self._silence_s
                patience = max(0.0, min(until, silent) - time.monotonic())
                ready = wait([worker.pipe for worker in busy], patience)
                for worker in busy:
                    if worker.pipe in ready:
                        yield from self._heard(worker)
                    elif time.monotonic() >= worker.heard + self._silence_s:
                        self._workers.remove(worker)
                        worker.end()
                        assert worker.task is not None
                        yield worker.task, Ended(f"had not returned after {self._silence_s:g} s")
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.end()
            self._workers.clear()

    def _hand_out(self, tasks: deque[T]) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        while tasks and (idle or len(self._workers) < self._most):
            worker = idle.pop() if idle else self._forked()
            worker.task, worker.heard = tasks.popleft(), time.monotonic()
            # A process that has just died is noticed when it is listened to.
            with suppress(BrokenPipeError):
                worker.pipe.send(worker.task)

    def _forked(self) -> "_Worker[T]":
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=self._serve, args=(there, os.getpid()))
        process.start()
        there.close()
        worker: _Worker[T] = _Worker(process, here)
        self._workers.append(worker)
        return worker

    def _serve(self, pipe: Connection, parent: int) -> None:
        os.setpgid(0, 0)
        die_with_parent(parent)
        prefer_to_be_killed()
        # Inductor would start as many processes as there are cores for each of these.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        try:
            while True:
                for said in self._work(pipe.recv()):
                    pipe.send(said)
                pipe.send(_OVER)
        except EOFError:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the interpreter's teardown is the parent's

    def _heard(self, worker: "_Worker[T]") -> Iterator[tuple[T, Any]]:
        assert worker.task is not None
        try:
            said = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._workers.remove(worker)
            yield worker.task, Ended(worker.end())
            return
        worker.heard = time.monotonic()
        if said != _OVER:
            yield worker.task, said
            return
        worker.task = None
        if self._renewed:
            self._workers.remove(worker)
            worker.process.kill()
            worker.end()
