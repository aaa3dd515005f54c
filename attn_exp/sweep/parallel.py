"""Sweep: the parent's part of a sweep whose jobs run in tasks. It alone shows progress and stores into the tracker."""

import contextlib
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_exp.core.case import Case
from attn_exp.core.errors import UserError
from attn_exp.core.record import Record, Request, sound_record, write_record
from attn_exp.run.job_queue import with_failed_profiles
from attn_exp.run.session import Session, stop_line, stops
from attn_exp.sweep.board import GONE_S, Board, Line, Watch, refresh_folder, running_elsewhere
from attn_exp.sweep.launcher import Launcher
from attn_exp.sweep.plan import LaunchPlan, group_jobs, write_plan

_FOLDER = ".launch"
_WATCH_S = 2.5
_UNSEEN_S = 0.5


class _Jobs:
    """What is known of the jobs of a launch."""

    def __init__(self, session: Session, folder: Path, requests: Sequence[Request]) -> None:
        self.session, self._folder = session, folder
        # In the order of the plan, which is that of the tasks.
        self.left = {request.job: request for request in requests}
        self.begun: dict[str, int] = {}
        # Records of earlier tries, which tasks replace.
        self._before = {job: found for job in self.left if (found := self._read(job)) is not None}
        self.halt: Record | None = None
        self._here: set[int] = set()
        self._later: list[str] = []
        # Jobs that a task has said are over, and whose records this host's file system does not show yet.
        self._unseen: dict[str, int] = {}

    def over(self) -> bool:
        """Whether nothing is left to do."""
        return not self.left or self.halt is not None

    def hear(self, line: Line) -> bool:
        """Take in what a task said; whether the tasks are to go on."""
        progress = self.session.progress
        self._look_again()
        if line.word == "hello" and line.rest == socket.gethostname():
            self._here.add(line.task)
        elif line.word == "wait":
            progress.say(f"waiting for GPU {line.rest}, on which another attn_exp is measuring")
        elif line.word == "begin" and line.rest in self.left:
            self.begun[line.rest] = line.task
            progress.running(self.left[line.rest].label)
        elif line.word == "end" and line.rest in self.left:
            self._unseen[line.rest] = line.task
            self._look_again()
        return self.halt is None

    def take(self, record: Record, task: int | None) -> None:
        """Count a job that is over; it is stored later if storing would disturb a CPU that is measured here."""
        request = self.left.pop(record.request.job)
        if request.device == "cpu" and task in self._here:
            self.session.progress.finished(record)
            self._later.append(request.job)
        else:
            self.session.finish(record)
        if stops(record) and self.halt is None:
            self.halt = record

    def store(self) -> None:
        """Store what waited until nothing is measured any more."""
        for job in self._later:
            if (found := self._written(job)) is not None:
                self.session.log(found)
        self._later.clear()

    def give_up(self, launcher: Launcher, ended: dict[int, str]) -> None:
        """Make a record for each job that has none since its task died."""
        until = time.monotonic() + GONE_S
        if not ended:
            # No task died, so they have measured all; what they said and wrote may not be seen here yet.
            self._unseen |= {job: self.begun.get(job, -1) for job in self.left}
        while self._unseen and time.monotonic() < until:
            self._look_again()
            if self._unseen:
                time.sleep(_UNSEEN_S)
        for job, request in list(self.left.items()):
            task = self.begun.get(job)
            found = self._written(job)
            if found is None:
                why = ended.get(task, "it ended early") if task is not None else ""
                reason = f"task {task} died: {why}" if task is not None else f"all tasks of {launcher.name} had ended"
                now, before = time.time(), self._before.get(job)
                found = Record(request=request, status="crashed", reason=reason, started_at=now, finished_at=now)
                if before is not None and before.final:
                    found = with_failed_profiles(before, request, "crashed", reason)
                (self._folder / job).mkdir(exist_ok=True)
                write_record(found, self._folder / job)
            self.take(found, task)

    def _look_again(self) -> None:
        """Take the records that tasks have written; NFS may show this host for a while that there is none."""
        for job, task in list(self._unseen.items()):
            if (found := self._written(job)) is not None:
                del self._unseen[job]
                self.take(found, task)

    def _written(self, job: str) -> Record | None:
        """The record that a task of this launch has written."""
        found = self._read(job)
        return None if found == self._before.get(job) else found

    def _read(self, job: str) -> Record | None:
        refresh_folder(self._folder / job)
        return sound_record(self._folder / job)


def launch(
    session: Session,
    launcher: Launcher,
    isolation: dict[str, Any],
    requests: Sequence[Request],
    done: dict[Case, str | None],
) -> None:
    """Run the jobs of an opened session in the launcher's tasks, until all have a record.

    Raises:
        UserError: no task can be started, or another command runs this sweep.
        SystemExit: a job ended as `stop_on` names.
    """
    folder = session.opened.folder
    board = Board(folder / _FOLDER / secrets.token_hex(4))
    groups = group_jobs(requests, done)
    tasks = launcher.tasks if launcher.pinned else min(launcher.tasks, len(groups))
    if len(groups) < launcher.tasks:
        cases = "1 case" if len(groups) == 1 else f"{len(groups)} cases"
        session.progress.say(f"{cases} for {launcher.tasks} tasks: rivals of one case share one, so others stay idle")
    plan = LaunchPlan(
        folder=str(folder),
        cwd=str(Path.cwd()),
        isolation=isolation,
        groups=groups,
        gpus=tuple(gpu.uuid for gpu in launcher.gpus) if launcher.pinned else (),
    )
    jobs = _Jobs(session, folder, [request for group in groups for request in group.jobs])
    # Rivals that are one job on this device are counted once.
    session.progress.total -= len(requests) - len(jobs.left)
    with session.writing():
        ended = _run(launcher, board, plan, tasks, jobs)
        if jobs.halt is None:
            jobs.give_up(launcher, ended)
    jobs.store()
    for task, why in ended.items():
        session.progress.say(f"task {task} of {launcher.name} died: {why}")
    if not ended:
        _clear(board.folder)
    if jobs.halt is not None:
        session.progress.say(stop_line(jobs.halt))
        raise SystemExit(1)


def _run(launcher: Launcher, board: Board, plan: LaunchPlan, tasks: int, jobs: _Jobs) -> dict[int, str]:
    """Run the tasks while listening to them; whatever happens meanwhile, none is left behind."""
    session = jobs.session
    # The last first, and each of them whether the others could be done or not.
    with contextlib.ExitStack() as failing:
        failing.callback(_clear, board.folder)
        board.open()
        _check_alone(board.folder, session.opened.name)
        write_plan(plan, board.folder)
        watch = Watch(board, tasks, jobs.hear)
        for step in (launcher.close, jobs.store, watch.stop):
            failing.callback(step)
        ended = launcher.run(board.folder, tasks, session.progress.say, jobs.over)
        if ended:
            # What is left of a task that died, or that an engine lost sight of, must not go on behind our back.
            watch.stop()
        watch.close()
        failing.pop_all()
    launcher.close()
    return ended


def _clear(launch: Path) -> None:
    """Remove a launch's folder; its tasks, if there are any, end then."""
    shutil.rmtree(launch, ignore_errors=True)
    with contextlib.suppress(OSError):
        launch.parent.rmdir()


def _check_alone(own: Path, sweep: str) -> None:
    """Clear what earlier launches of this sweep left; tasks of one whose parent is gone see their folder go, and end.

    To be called when our own is open: of two that start at once none misses the other.

    Raises:
        UserError: the parent of another one is alive.
    """
    for other in sorted(own.parent.glob("*")):
        if other == own:
            continue
        if running_elsewhere(other, _WATCH_S):
            raise UserError(f"another command is running sweep={sweep}: wait for it, or choose another name")
        _clear(other)
