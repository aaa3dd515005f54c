"""The parent's part of a sweep whose jobs run in tasks. Only the parent shows progress and logs to the tracker."""

import contextlib
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from attn_exp.config.compose import isolation_options
from attn_exp.core.case.case import Case
from attn_exp.core.errors import UserError
from attn_exp.core.record.file import sound_record, write_record
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Request
from attn_exp.execution.context import already_running
from attn_exp.execution.job_queue import with_failed_profiles
from attn_exp.execution.session import Session, stops
from attn_exp.sweep.board import GONE_S, Board, Line, Watch, refresh_folder, running_elsewhere
from attn_exp.sweep.launcher import Launcher
from attn_exp.sweep.plan import LaunchPlan, group_jobs, write_plan

_FOLDER = ".launch"
_WATCH_S = 2.5
_UNSEEN_S = 0.5


class _Jobs:
    """The state of the jobs of a launch."""

    def __init__(self, session: Session, folder: Path, requests: Sequence[Request]) -> None:
        self.session, self._folder = session, folder
        # In the order of the plan, in which tasks take them.
        self.left = {request.job: request for request in requests}
        self.begun: dict[str, int] = {}
        # Records of earlier attempts, which tasks replace.
        self._before = {job: record for job in self.left if (record := self._read(job)) is not None}
        self.halt: Record | None = None
        # The first record that `stop_on` names.
        self._named: Record | None = None
        # Sentences of tasks whose GPU was held by others for too long.
        self.held: list[str] = []
        # Jobs that have ended, and whose records this host's file system does not show yet.
        self._unseen: set[str] = set()

    def over(self) -> bool:
        """Return whether no job is left, or `stop_on` has ended the sweep."""
        return not self.left or self.halt is not None

    def handle(self, line: Line) -> bool:
        """Handle a line of a task; return whether the tasks are to go on."""
        self._collect_unseen()
        if line.word == "wait":
            self.session.say(f"waiting for GPU {line.rest}, on which another attn_exp is measuring")
        elif line.word == "held":
            self.held.append(line.rest)
        elif line.word == "begin" and line.rest in self.left:
            self.begun[line.rest] = line.task
            self.session.progress.running(self.left[line.rest].label)
        elif line.word == "end" and line.rest in self.left:
            self._unseen.add(line.rest)
            self._collect_unseen()
        return self.halt is None

    def finish(self, record: Record) -> None:
        """Count a job that has ended, and log it."""
        del self.left[record.request.job]
        self.session.finish(record)
        if stops(record) and self._named is None:
            self._named = record
        named = self._named and self._named.request.turns_key
        # Rivals that are measured in turns are kept whole before a sweep ends.
        if self.halt is None and all(request.turns_key != named for request in self.left.values()):
            self.halt = self._named

    def record_lost(self, launcher: Launcher, ended: dict[int, str]) -> None:
        """Write a record for each job that has none because its task died, not for one whose GPU was held by others."""
        until = time.monotonic() + GONE_S
        if not ended:
            # No task died, so all jobs were measured but those of GPUs that were held; their records may not be
            # visible here yet.
            self._unseen |= {job for job in self.left if job in self.begun or not self.held}
        while self._unseen and time.monotonic() < until:
            self._collect_unseen()
            if self._unseen:
                time.sleep(_UNSEEN_S)
        for job, request in list(self.left.items()):
            task = self.begun.get(job)
            record = self._written(job)
            if record is None and task is None and self.held:
                continue
            if record is None:
                why = ended.get(task, "it ended early") if task is not None else ""
                reason = f"task {task} died: {why}" if task is not None else f"all tasks of {launcher.name} had ended"
                now, before = time.time(), self._before.get(job)
                record = Record(request=request, status="crashed", reason=reason, started_at=now, finished_at=now)
                if before is not None and before.final:
                    record = with_failed_profiles(before, request, "crashed", reason)
                (self._folder / job).mkdir(exist_ok=True)
                write_record(record, self._folder / job)
            self.finish(record)

    def _collect_unseen(self) -> None:
        """Collect records that tasks have written; NFS may hide them from this host for a while."""
        for job in list(self._unseen):
            if (record := self._written(job)) is not None:
                self._unseen.discard(job)
                self.finish(record)

    def _written(self, job: str) -> Record | None:
        """Return the record of a job if a task of this launch has written it."""
        record = self._read(job)
        return None if record == self._before.get(job) else record

    def _read(self, job: str) -> Record | None:
        refresh_folder(self._folder / job)
        return sound_record(self._folder / job)


def launch(session: Session, launcher: Launcher, requests: Sequence[Request], done: dict[Case, str | None]) -> None:
    """Run the jobs of an opened session in the launcher's tasks, until all have a record.

    Raises UserError if no task can be started, another command is running this sweep, or others hold a GPU for too
    long, and SystemExit if a job ended as `stop_on` names.
    """
    folder = session.opened.folder
    board = Board(folder / _FOLDER / secrets.token_hex(4))
    groups = group_jobs(requests, done)
    tasks = launcher.tasks if launcher.pinned else min(launcher.tasks, len(groups))
    if len(groups) < launcher.tasks:
        cases = "1 case" if len(groups) == 1 else f"{len(groups)} cases"
        session.say(f"{cases} for {launcher.tasks} tasks: rivals of one case share one, so others stay idle")
    plan = LaunchPlan(
        folder=str(folder),
        cwd=str(Path.cwd()),
        isolation=isolation_options(session.opened.options),
        groups=groups,
        gpu_wait_s=session.opened.gpu_wait_s,
        gpus=tuple(gpu.uuid for gpu in launcher.gpus) if launcher.pinned else (),
    )
    jobs = _Jobs(session, folder, [request for group in groups for request in group.jobs])
    # Combinations that are the same job on this device are counted once.
    session.progress.total -= len(requests) - len(jobs.left)
    with session.writing():
        ended = _run(launcher, board, plan, tasks, jobs)
        if jobs.halt is None:
            jobs.record_lost(launcher, ended)
    for task, why in ended.items():
        session.say(f"task {task} of {launcher.name} died: {why}")
    if not ended:
        _clear(board.folder)
    if jobs.held and jobs.left and jobs.halt is None:
        raise UserError(jobs.held[0])
    if jobs.halt is not None:
        session.halt(jobs.halt)


def _run(launcher: Launcher, board: Board, plan: LaunchPlan, tasks: int, jobs: _Jobs) -> dict[int, str]:
    """Run the tasks and handle their lines; leave no task behind, whatever fails."""
    session = jobs.session
    # Callbacks run in reverse order, each even if another fails.
    with contextlib.ExitStack() as failing:
        failing.callback(_clear, board.folder)
        board.open()
        _check_alone(board.folder, session.opened.name)
        write_plan(plan, board.folder)
        watch = Watch(board, tasks, jobs.handle)
        for step in (launcher.close, watch.stop):
            failing.callback(step)
        ended = launcher.run(board.folder, tasks, session.say, jobs.over)
        if ended:
            # Children of a task that died, or a task that its engine lost, must not keep running.
            watch.stop()
        watch.close()
        failing.pop_all()
    launcher.close()
    return ended


def _clear(launch: Path) -> None:
    """Remove a launch's folder, upon which its tasks end."""
    shutil.rmtree(launch, ignore_errors=True)
    with contextlib.suppress(OSError):
        launch.parent.rmdir()


def _check_alone(own: Path, sweep: str) -> None:
    """Remove what earlier launches of this sweep left, upon which their tasks end; raise UserError if one is alive.

    Call this after opening our own board, so that of two launches that start at once each sees the other.
    """
    for other in sorted(own.parent.glob("*")):
        if other == own:
            continue
        if running_elsewhere(other, _WATCH_S):
            raise already_running(sweep)
        _clear(other)
