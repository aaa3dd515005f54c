"""Store: the records of a sweep, as they lie in its folder."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.record import FILE_NAME, PassRecord, Record, RecordError, read_record


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


def final_record(folder: Path) -> Record | None:
    """The record of a job that need not run again; None if it is missing, broken, or of a failure worth a retry."""
    try:
        record = read_record(folder)
    except RecordError:
        return None
    return record if record is not None and record.final else None
