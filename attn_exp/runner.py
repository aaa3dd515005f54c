"""Runner: jobs of one sweep, one after another through one isolation; each ends as a record in its folder."""

import shutil
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import msgspec

from attn_exp.errors import UserError
from attn_exp.isolate import Isolation, Outcome
from attn_exp.names import is_inside
from attn_exp.profile import FOLDER as PROFILES
from attn_exp.profile import Profile
from attn_exp.record import (
    FILE_NAME,
    LOG_NAME,
    REQUEST_NAME,
    Record,
    RecordError,
    Request,
    read_record,
    write_record,
    write_whole,
)


class Runner:
    """Submits requests below the sweep's `folder`, on the GPU `gpu_uuid` if one is leased; answers in that order."""

    def __init__(self, isolation: Isolation, folder: Path, gpu_uuid: str | None = None) -> None:
        self._isolation = isolation
        self._folder = folder
        self._gpu_uuid = gpu_uuid
        self._pending: deque[tuple[Request, float]] = deque()

    @property
    def waiting(self) -> int:
        """How many jobs are submitted and not answered for."""
        return len(self._pending)

    @property
    def oldest(self) -> Request:
        """The job that `wait` answers for next."""
        return self._pending[0][0]

    def submit(self, request: Request) -> None:
        """Write the job's folder, without what an earlier try left, and hand it over.

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
        for name in (FILE_NAME, LOG_NAME):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / PROFILES, ignore_errors=True)
        write_whole(folder / REQUEST_NAME, msgspec.yaml.encode(request))
        self._pending.append((request, time.time()))
        self._isolation.submit(folder)

    def wait(self) -> Outcome:
        """Wait until the oldest job is over."""
        return self._isolation.wait()

    def record(self, outcome: Outcome) -> Record:
        """The record of the oldest job: the worker's, or one that says why there is none."""
        request, submitted_at = self._pending.popleft()
        status, reason = outcome.status, outcome.reason
        if status is None or outcome.profiling:
            try:
                record = read_record(outcome.folder)
            except RecordError as error:
                record, reason = None, str(error)
            if record is not None:
                return _with_lost_profiles(record, outcome)
            if status is None:
                status, reason = "error", reason or "the worker ended the job without a record"
        record = Record(request=request, status=status, reason=reason, started_at=submitted_at, finished_at=time.time())
        write_record(record, outcome.folder)
        return record


def _with_lost_profiles(record: Record, outcome: Outcome) -> Record:
    """The record, with a reason for each profile that the worker did not come to write."""
    lost = [str(one["name"]) for one in record.request.profilers if one["name"] not in record.profiles]
    if record.status != "ok" or not lost or not outcome.profiling:
        return record
    reasons = [outcome.reason, *(f"not tried: the worker was lost in profiler={lost[0]}" for _ in lost[1:])]
    profiles = {name: Profile(status="failed", reason=reason) for name, reason in zip(lost, reasons, strict=True)}
    record = replace(record, profiles=record.profiles | profiles)
    write_record(record, outcome.folder)
    return record
