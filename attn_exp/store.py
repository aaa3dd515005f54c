"""Store: the records of a sweep, as they lie in its folder."""

from collections.abc import Iterator
from pathlib import Path

from attn_exp.record import FILE_NAME, Record, RecordError, read_record


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


def final_record(folder: Path) -> Record | None:
    """The record of a job that need not run again; None if it is missing, broken, or of a failure worth a retry."""
    try:
        record = read_record(folder)
    except RecordError:
        return None
    return record if record is not None and record.final else None
