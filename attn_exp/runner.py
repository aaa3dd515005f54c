"""Runner: jobs of one sweep, one after another through one isolation; each ends as a record in its folder."""

import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import msgspec

from attn_exp.isolate import Isolation, Outcome
from attn_exp.record import (
    FILE_NAME,
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
        """Write the job's folder, without the record of an earlier try, and hand it over."""
        folder = self._folder / request.job
        if self._gpu_uuid is not None:
            request = replace(request, gpu_uuid=self._gpu_uuid)
        folder.mkdir(exist_ok=True)
        (folder / FILE_NAME).unlink(missing_ok=True)
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
        if status is None:
            try:
                record = read_record(outcome.folder)
            except RecordError as error:
                record, reason = None, str(error)
            if record is not None:
                return record
            status, reason = "error", reason or "the worker ended the job without a record"
        record = Record(request=request, status=status, reason=reason, started_at=submitted_at, finished_at=time.time())
        write_record(record, outcome.folder)
        return record
