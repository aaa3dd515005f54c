"""JobQueue: jobs of one sweep, one after another through one isolation; each ends as a record in its folder."""

import contextlib
import shutil
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from attn_exp.core.errors import UserError, is_inside
from attn_exp.core.profile import FOLDER as PROFILES
from attn_exp.core.profile import Profile
from attn_exp.core.record import (
    FILE_NAME,
    LOG_NAME,
    REQUEST_NAME,
    Record,
    RecordError,
    Request,
    decode_record,
    read_record,
    write_record,
    write_whole,
)
from attn_exp.core.status import Status
from attn_exp.run.worker_process import Isolation, Outcome


@dataclass(frozen=True)
class _Pending:
    request: Request
    submitted_at: float
    # What `record.json` was if it was final: measured anew for its profiles, it stays until there is another.
    before: bytes | None


class JobQueue:
    """Submits requests below the sweep's `folder`, on the GPU `gpu_uuid` if one is leased; answers in that order."""

    def __init__(self, isolation: Isolation, folder: Path, gpu_uuid: str | None = None) -> None:
        self._isolation = isolation
        self._folder = folder
        self._gpu_uuid = gpu_uuid
        self._pending: deque[_Pending] = deque()

    @property
    def waiting(self) -> int:
        """How many jobs are submitted and not answered for."""
        return len(self._pending)

    @property
    def oldest(self) -> Request:
        """The job that `wait` answers for next."""
        return self._pending[0].request

    def has(self, job: str) -> bool:
        """Whether a job of this name is submitted and not answered for."""
        return any(pending.request.job == job for pending in self._pending)

    def submit(self, request: Request) -> None:
        """Write the job's folder, without what an earlier try left, and hand it over; a final record stays meanwhile.

        Raises:
            UserError: the folder is a link that leads out of the sweep's.
        """
        folder = self._folder / request.job
        if self._gpu_uuid is not None:
            request = replace(request, gpu_uuid=self._gpu_uuid)
        folder.mkdir(exist_ok=True)
        if not is_inside(folder, self._folder):
            raise UserError(
                f"{folder} is a link that leads out of the sweep's folder: remove it, or choose another sweep="
            )
        before = _final(folder)
        for name in (LOG_NAME,) if before else (FILE_NAME, LOG_NAME):
            (folder / name).unlink(missing_ok=True)
        if (folder / PROFILES).is_symlink():
            (folder / PROFILES).unlink()
        if not before:
            shutil.rmtree(folder / PROFILES, ignore_errors=True)
        write_whole(folder / REQUEST_NAME, msgspec.yaml.encode(request))
        self._pending.append(_Pending(request, time.time(), before))
        self._isolation.submit(folder)

    def wait(self) -> Outcome:
        """Wait until the oldest job is over."""
        return self._isolation.wait()

    def record(self, outcome: Outcome) -> Record:
        """The record of the oldest job: the worker's, or one that says why there is none.

        A worker that dies after it has written one has lost nothing. Where a final record was to get profiles, and the
        worker left no other, it stays, and its profiles say why they are not there.
        """
        pending = self._pending.popleft()
        status, reason = outcome.status, outcome.reason
        try:
            found = _newer(outcome.folder, pending.before)
        except RecordError as error:
            found, reason = None, reason or str(error)
        if found is not None:
            _remove_others(outcome.folder / PROFILES, found)
            return _with_lost_profiles(found, outcome)
        status, reason = status or "error", reason or "the worker ended the job without a record"
        if pending.before is not None:
            record = with_failed_profiles(
                decode_record(pending.before, outcome.folder / FILE_NAME), pending.request, status, reason
            )
        else:
            record = Record(
                request=pending.request,
                status=status,
                reason=reason,
                started_at=pending.submitted_at,
                finished_at=time.time(),
            )
        write_record(record, outcome.folder)
        return record


def _final(folder: Path) -> bytes | None:
    """The content of a job's record if that is final."""
    path = folder / FILE_NAME
    with contextlib.suppress(RecordError, OSError):
        content = path.read_bytes()
        return content if decode_record(content, path).final else None
    return None


def _newer(folder: Path, before: bytes | None) -> Record | None:
    """The record in a job's folder if it is another than the one before."""
    path = folder / FILE_NAME
    if before is not None and path.exists() and path.read_bytes() == before:
        return None
    return read_record(folder)


def with_failed_profiles(record: Record, request: Request, status: Status, reason: str) -> Record:
    """A final record whose measuring anew for other profiles failed."""
    said = Profile(status="failed", reason=f"measuring anew for it ended as {status}: {reason}")
    asked = replace(record.request, profilers=request.profilers)
    return replace(record, request=asked, profiles=record.profiles | dict.fromkeys(record.lacking(request), said))


def _remove_others(profiles: Path, record: Record) -> None:
    """Remove what profilers left that an earlier record of the job had, and this one has not."""
    for folder in profiles.iterdir() if profiles.is_dir() else ():
        if folder.is_dir() and folder.name not in record.profiles:
            shutil.rmtree(folder, ignore_errors=True)


def _with_lost_profiles(record: Record, outcome: Outcome) -> Record:
    """The record, with a reason for each profile that the worker did not come to write."""
    lost = record.lacking(record.request)
    if record.status != "ok" or not lost or not outcome.profiling:
        return record
    reasons = [outcome.reason, *(f"not tried: the worker was lost in profiler={lost[0]}" for _ in lost[1:])]
    profiles = {name: Profile(status="failed", reason=reason) for name, reason in zip(lost, reasons, strict=True)}
    record = replace(record, profiles=record.profiles | profiles)
    write_record(record, outcome.folder)
    return record
