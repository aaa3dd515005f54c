"""The queue of jobs that one isolation runs, case after case. Each ends as a record in its folder."""

import contextlib
import itertools
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from attn_exp.core.errors import RecordError, UserError, is_inside
from attn_exp.core.files import read_whole, remove, write_whole
from attn_exp.core.host.process import memory_of_others
from attn_exp.core.record.file import FILE_NAME, LOG_NAME, decode_record, read_record, write_record
from attn_exp.core.record.profile import FOLDER as PROFILES
from attn_exp.core.record.profile import Profile
from attn_exp.core.record.record import METHOD_VERSION, Record
from attn_exp.core.record.request import REQUEST_NAME, Request
from attn_exp.core.record.status import Status, with_others
from attn_exp.core.redaction import redacted
from attn_exp.execution.isolation import InProcess
from attn_exp.execution.worker import Outcome, Worker

# The name of a record that this version cannot read: of a newer one, or broken. And of one by another method.
ASIDE_NAME, OTHER_METHOD_NAME = "record.aside.json", "record.method-{}.json"


@dataclass(frozen=True)
class _Pending:
    request: Request
    # Those that are measured in turns have the same number.
    group: int
    submitted_at: float
    # The content of a final `record.json`. If the job is repeated for its profiles, this record is kept until it is
    # replaced.
    before: bytes | None


class JobQueue:
    """Hands requests to an isolation and collects their records in the same order.

    `folder` is the sweep's. `aside` has a sentence for each record that this version cannot read, and that is kept
    under another name.
    """

    def __init__(self, isolation: Worker | InProcess, folder: Path, gpu_uuid: str | None = None) -> None:
        self._isolation = isolation
        self._folder = folder
        self._gpu_uuid = gpu_uuid
        self._pending: deque[_Pending] = deque()
        self._groups = 0
        self.aside: list[str] = []

    @property
    def waiting(self) -> int:
        """The number of groups with jobs that are submitted and not collected."""
        return len({pending.group for pending in self._pending})

    @property
    def oldest(self) -> Request:
        """The job that `wait` waits for."""
        return self._pending[0].request

    @property
    def in_turns(self) -> dict[str, str]:
        """The backends of the jobs that are measured in turns with the oldest, by the jobs' names."""
        alone = isinstance(self._isolation, Worker) and not self._isolation.reuse
        return {
            one.request.job: str(one.request.backend["name"])
            for one in (list(self._pending)[:1] if alone else self._pending)
            if one.group == self._pending[0].group
        }

    def has(self, job: str) -> bool:
        """Return whether a job of this name is submitted and not collected."""
        return any(pending.request.job == job for pending in self._pending)

    def submit(self, requests: Sequence[Request], beside: str | None = None) -> None:
        """Hand over jobs that are measured in turns, beside a job of this name that has a record.

        Raises UserError if a job's folder is a link to somewhere outside the sweep's folder.
        """
        self._groups += 1
        folders = [self._made(request) for request in requests]
        self._isolation.submit(*folders, beside=None if beside is None else self._folder / beside)

    def _made(self, request: Request) -> Path:
        """Write the job's folder, and remove what an earlier attempt left; keep a final record until it is replaced."""
        folder = self._folder / request.job
        if self._gpu_uuid is not None:
            request = replace(request, gpu_uuid=self._gpu_uuid)
        if not folder.is_dir() or (folder.is_symlink() and is_inside(folder, self._folder)):
            remove(folder)  # a link that leads nowhere, to itself or to another job, or a file
        folder.mkdir(exist_ok=True)
        if not is_inside(folder, self._folder):
            raise UserError(
                f"{folder} is a link that leads out of the sweep's folder: remove it, or choose another sweep="
            )
        before = self._final(folder)
        for name in (LOG_NAME,) if before else (FILE_NAME, LOG_NAME):
            remove(folder / name)
        if (folder / PROFILES).is_symlink() or not before:
            remove(folder / PROFILES)
        # Without waiting for the disk, for milliseconds: the same command writes it again.
        write_whole(folder / REQUEST_NAME, msgspec.yaml.encode(request), lasting=False)
        self._pending.append(_Pending(request, self._groups, time.time(), before))
        return folder

    def _final(self, folder: Path) -> bytes | None:
        """Return the content of a job's record if it is final; one that cannot be read is kept under another name."""
        path = folder / FILE_NAME
        try:
            content = read_whole(path)
            record = decode_record(content, path)
            if record.final and record.method_version != METHOD_VERSION:
                path.replace(_free(folder / OTHER_METHOD_NAME.format(record.method_version)))
                return None
            return content if record.final else None
        except OSError:
            return None
        except RecordError as error:
            aside = _free(folder / ASIDE_NAME)
            path.replace(aside)
            self.aside.append(f"{error}: it is kept as {aside.name}, and the job is measured again")
            return None

    def wait(self, stage: Callable[[str, Path | None], None] = lambda stage, folder: None) -> Outcome:
        """Wait until the oldest job is over; `stage` is called as by `Worker.wait`."""
        return self._isolation.wait(stage)

    def record(self, outcome: Outcome) -> Record:
        """Return the record of the oldest job: the worker's, or a new one that says why the worker wrote none.

        If a job was repeated for its profiles in vain, its record is kept, and its profiles say why they failed.
        """
        pending = self._pending.popleft()
        status, reason = outcome.status, outcome.reason
        try:
            record = _new_record(outcome.folder, pending.before)
        except RecordError as error:
            record, reason = None, reason or str(error)
        if record is not None:
            for old in (outcome.folder / PROFILES).glob("*/"):
                if old.name not in record.profiles:
                    shutil.rmtree(old, ignore_errors=True)
            return _with_lost_profiles(record, outcome)
        status, reason = status or "error", redacted(reason or "the worker ended the job without a record")
        others = memory_of_others() if status == "out_of_memory" else None
        if pending.before is not None:
            record = with_failed_profiles(
                decode_record(pending.before, outcome.folder / FILE_NAME), pending.request, status, reason
            )
        else:
            record = Record(
                request=pending.request,
                status=status,
                reason=with_others(reason, others),
                environment={} if others is None else {"memory_of_others": [*others]},
                started_at=pending.submitted_at,
                finished_at=time.time(),
            )
        write_record(record, outcome.folder)
        return record


def _free(path: Path) -> Path:
    """Return a path at which nothing is: this one, else `record.aside-2.json` and so on."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not os.path.lexists(one))


def _new_record(folder: Path, before: bytes | None) -> Record | None:
    """Return the record in a job's folder unless it is the one from before."""
    path = folder / FILE_NAME
    with contextlib.suppress(OSError):
        if before is not None and read_whole(path) == before:
            return None
    return read_record(folder)


def with_failed_profiles(record: Record, request: Request, status: Status, reason: str) -> Record:
    """Return a final record whose repetition for more profiles failed."""
    failed = Profile(status="failed", reason=f"repeating the job for it ended as {status}: {reason}")
    repeated = replace(record.request, profilers=request.profilers)
    return replace(record, request=repeated, profiles=record.profiles | dict.fromkeys(record.lacking(request), failed))


def _with_lost_profiles(record: Record, outcome: Outcome) -> Record:
    """Return the record with a reason for each profile that the worker did not write."""
    lost = record.lacking(record.request)
    if record.status != "ok" or not lost or not outcome.profiling:
        return record
    reasons = [outcome.reason, *(f"not tried: the worker died in profiler={lost[0]}" for _ in lost[1:])]
    profiles = {name: Profile(status="failed", reason=reason) for name, reason in zip(lost, reasons, strict=True)}
    record = replace(record, profiles=record.profiles | profiles)
    write_record(record, outcome.folder)
    return record
