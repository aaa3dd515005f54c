"""Sweep: the parent's part of a sweep whose jobs run in tasks. It alone shows progress and stores into the tracker."""

import contextlib
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_exp.case import Case
from attn_exp.errors import UserError
from attn_exp.launchers.base import Launcher
from attn_exp.launchers.board import Board, Line, running_elsewhere
from attn_exp.launchers.plan import Plan, group_jobs, write_plan
from attn_exp.launchers.watch import Watch
from attn_exp.record import Record, RecordError, Request, read_record, write_record
from attn_exp.run import Session, stop_line, stops

_FOLDER = ".launch"
_WATCH_S = 2.5


class _Jobs:
    """What is known of the jobs of a launch."""

    def __init__(self, session: Session, folder: Path, requests: Sequence[Request]) -> None:
        self._session, self._folder = session, folder
        # In the order of the plan, which is that of the tasks.
        self.left = {request.job: request for request in requests}
        self.begun: dict[str, int] = {}
        self.halt: Record | None = None
        self._here: set[int] = set()
        self._later: list[str] = []

    def hear(self, line: Line) -> bool:
        """Take in what a task said; whether the tasks are to go on."""
        progress = self._session.progress
        if line.word == "hello" and line.rest == socket.gethostname():
            self._here.add(line.task)
        elif line.word == "wait":
            progress.say(f"waiting for GPU {line.rest}, on which another attn_exp is measuring")
        elif line.word == "begin" and line.rest in self.left:
            self.begun[line.rest] = line.task
            progress.running(self.left[line.rest].label)
        elif line.word == "end" and line.rest in self.left:
            self.take(self._read(line.rest), line.task)
        return self.halt is None

    def take(self, record: Record, task: int | None) -> None:
        """Count a job that is over; it is stored later if storing would disturb a CPU that is measured here."""
        request = self.left.pop(record.request.job)
        if request.device == "cpu" and task in self._here:
            self._session.progress.finished(record)
            self._later.append(request.job)
        else:
            self._session.take(record)
        if stops(record) and self.halt is None:
            self.halt = record

    def store(self) -> None:
        """Store what waited until nothing is measured any more."""
        for job in self._later:
            self._session.log(self._read(job))
        self._later.clear()

    def give_up(self, launcher: Launcher, ended: dict[int, str]) -> None:
        """Make a record for each job that has none since its task died."""
        for job, request in list(self.left.items()):
            task = self.begun.get(job)
            found = self._written(job) if task is not None else None
            if found is None:
                why = ended.get(task, "it ended early") if task is not None else ""
                reason = f"task {task} died: {why}" if task is not None else f"all tasks of {launcher.name} had ended"
                now = time.time()
                found = Record(request=request, status="crashed", reason=reason, started_at=now, finished_at=now)
                (self._folder / job).mkdir(exist_ok=True)
                write_record(found, self._folder / job)
            self.take(found, task)

    def _read(self, job: str) -> Record:
        found = self._written(job)
        # The task has just read or written it.
        assert found is not None, f"no record in {self._folder / job}"
        return found

    def _written(self, job: str) -> Record | None:
        try:
            return read_record(self._folder / job)
        except RecordError:
            return None


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
    assert session.folder is not None
    folder = session.folder
    board = Board(_fresh(folder, session.sweep))
    groups = group_jobs(requests, done)
    tasks = launcher.tasks if launcher.pinned else min(launcher.tasks, len(groups))
    if len(groups) < launcher.tasks:
        cases = "1 case" if len(groups) == 1 else f"{len(groups)} cases"
        session.progress.say(f"{cases} for {launcher.tasks} tasks: rivals of one case share one, so others stay idle")
    plan = Plan(
        folder=str(folder),
        cwd=str(Path.cwd()),
        isolation=isolation,
        groups=groups,
        gpus=tuple(gpu.uuid for gpu in launcher.gpus) if launcher.pinned else (),
    )
    board.open()
    write_plan(plan, board.folder)
    jobs = _Jobs(session, folder, [request for group in groups for request in group.jobs])
    watch = Watch(board, tasks, jobs.hear)
    try:
        ended = launcher.run(board.folder, tasks, session.progress.say)
        if ended:
            # What is left of a task that died, or that an engine lost sight of, must not go on behind our back.
            watch.stop()
        watch.close()
    except BaseException:
        watch.stop()
        jobs.store()
        launcher.close()
        _clear(board.folder)
        raise
    launcher.close()
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


def _clear(launch: Path) -> None:
    """Remove a launch's folder; its tasks, if there are any, end then."""
    shutil.rmtree(launch, ignore_errors=True)
    with contextlib.suppress(OSError):
        launch.parent.rmdir()


def _fresh(folder: Path, sweep: str) -> Path:
    """A folder for this launch; tasks of an earlier one whose parent is gone see theirs go, and end.

    Raises:
        UserError: the parent of an earlier one is alive.
    """
    for old in sorted((folder / _FOLDER).glob("*")):
        if running_elsewhere(old, _WATCH_S):
            raise UserError(f"another command is running sweep={sweep}: wait for it, or choose another name")
        _clear(old)
    return folder / _FOLDER / secrets.token_hex(4)
