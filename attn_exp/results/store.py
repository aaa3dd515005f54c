"""Store: the records of a sweep, as they lie in its folder, and what tells the folder from any other."""

import contextlib
import hashlib
import os
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.errors import is_inside
from attn_exp.core.files import owner_mark
from attn_exp.core.record import FILE_NAME, PassRecord, Record, RecordError, Request, read_record, sound_record

IDENTITY_NAME = "sweep.id"


def read_sweep(folder: Path) -> Iterator[Record | RecordError]:
    """The records in a sweep's folder, oldest first by the order of their jobs' folders; a broken file as its error."""
    for path in sorted(folder.glob(f"*/{FILE_NAME}")):
        try:
            record = read_record(path.parent)
        except RecordError as error:
            yield error
        else:
            if record is not None:
                yield record


def read_summaries(folder: Path) -> Iterator[Record | RecordError]:
    """The same, each record as small as tables need it: ten thousand whole ones are hundreds of megabytes."""
    shared: dict[bytes, dict[str, Any]] = {}
    for found in read_sweep(folder):
        yield _summary(found, shared) if isinstance(found, Record) else found


def _summary(record: Record, shared: dict[bytes, dict[str, Any]]) -> Record:
    """A record without samples and the like; what it has in common with others, such as the environment, is shared."""
    environment = shared.setdefault(msgspec.json.encode(record.environment), record.environment)
    return replace(
        record,
        request=replace(record.request, config={}),
        passes={name: _without_samples(measured) for name, measured in record.passes.items()},
        metrics={sys.intern(name): value for name, value in record.metrics.items()},
        environment=environment,
        telemetry=(),
        ceilings={},
        canaries={},
        notes={},
        stages_s={},
    )


def _without_samples(measured: PassRecord) -> PassRecord:
    kernels = tuple(replace(kernel, name=sys.intern(kernel.name)) for kernel in measured.kernels)
    return replace(measured, timings=(), errors={}, kernels=kernels)


def done_record(request: Request, folder: Path) -> Record | None:
    """The record of a job in its folder if it need not run again, else None.

    It is missing, broken, of a failure worth a retry, or lacks the profile of a profiler that is asked for; or it is
    another job's, or lies elsewhere, the folder being a link.
    """
    record = sound_record(folder) if is_inside(folder, folder.parent) else None
    if record is None or not record.final or record.request.job != request.job:
        return None
    # Only what could be measured is profiled.
    return None if record.status == "ok" and record.lacking(request) else record


def sweep_identity(folder: Path) -> str:
    """What tells a sweep from any other, wherever its folder is moved or mounted: made once, kept in the folder.

    Of a folder that cannot be written and has none it is made of the folder's place.
    """
    path = folder / IDENTITY_NAME
    temporary = folder / f".{IDENTITY_NAME}.{owner_mark()}"
    with contextlib.suppress(OSError):
        if not path.exists():
            temporary.write_text(f"{uuid.uuid4().hex}\n")
            try:
                # Whole or not at all, and the first of several processes wins.
                os.link(temporary, path)
            finally:
                temporary.unlink()
    try:
        found = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    return found if re.fullmatch("[0-9a-f]{32}", found) else place_identity(folder)


def place_identity(folder: Path) -> str:
    """What stands for a sweep whose folder could not be given an identity of its own: the folder's place."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]


def near(folder: Path) -> Path:
    """The folder as one would type it from here."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
