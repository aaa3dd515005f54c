"""The file of a record, `record.json` in its job's folder: written atomically, and checked when it is read.

`write_record` is called by worker/__main__.py, and by run/job_queue.py and sweep/parallel.py for workers that died.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.case import PASSES
from attn_exp.core.errors import NOT_DECODED, RecordError, UserError
from attn_exp.core.files import read_whole, write_whole
from attn_exp.core.record import SCHEMA, Record
from attn_exp.core.request import Measuring
from attn_exp.core.safe_text import printable_json
from attn_exp.core.status import Status

# The files in a job's folder beside its request.
FILE_NAME = "record.json"
LOG_NAME = "worker.log"
# The file that a duel adds to its folder.
VERDICTS_NAME = "duel.json"


def write_record(record: Record, folder: Path) -> None:
    """Write `record.json` into `folder` atomically."""
    write_whole(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(record), indent=1))


def read_record(folder: Path) -> Record | None:
    """Return the record in a job's folder, or None if there is none.

    Raises:
        RecordError: the file cannot be read, or is not a record of this schema.
    """
    path = folder / FILE_NAME
    try:
        content = read_whole(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    return decode_record(content, path)


def sound_record(folder: Path) -> Record | None:
    """Return the record in a job's folder, or None if there is none that can be read."""
    try:
        return read_record(folder)
    except RecordError:
        return None


def decode_record(content: bytes, path: Path) -> Record:
    """Decode a record's file; `path` is for messages.

    Raises:
        RecordError: it is not a record of this schema.
    """
    try:
        record = msgspec.json.decode(printable_json(content), type=Record)
    except (*NOT_DECODED, UserError) as error:
        raise RecordError(f"{path} is not a record: {error}") from error
    if record.schema != SCHEMA:
        raise RecordError(f"{path} has schema {record.schema}, this version reads {SCHEMA}")
    if (wrong := _wrong(record)) is not None:
        raise RecordError(f"{path} is not a record: {wrong}")
    return record


def _wrong(record: Record) -> str | None:
    for name, measured in record.passes.items():
        if any(len(timing.times_us) != len(timing.rounds) for timing in measured.timings):
            return f"the samples of {name} are not one a round index"
    request = record.request
    return inconsistency(
        record.status, request.backend, request.measuring, record.passes, record.environment, record.metrics
    )


def inconsistency(
    status: Status,
    backend: Mapping[str, Any],
    measuring: Measuring,
    passes: Iterable[str],
    environment: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> str | None:
    """Return why a decoded record is inconsistent although each of its fields has the right type, or None."""
    if not isinstance(backend.get("name"), str):
        return "its backend has no name"
    if not isinstance(environment.get("versions", {}), dict):
        return "environment.versions is no object"
    for name in passes:
        if name not in PASSES:
            return f"it has a pass {name!r}"
    if status == "ok":
        for name in measuring.passes:
            if not metrics.get(f"{name}/time_us", 0.0) > 0:
                return f"it is ok without a time of {name}"
    return None
