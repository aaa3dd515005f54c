"""Store: the records of a sweep, as they lie in its folder."""

from collections.abc import Iterator
from pathlib import Path

from attn_exp.record import FILE_NAME, Record, RecordError, Request, read_record


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


def done_record(request: Request, folder: Path) -> Record | None:
    """The record of a job in its folder if it need not run again, else None.

    It is missing, broken, of a failure worth a retry, or lacks the profile of a profiler that is asked for.
    """
    try:
        record = read_record(folder)
    except RecordError:
        return None
    if record is None or not record.final:
        return None
    # Only what could be measured is profiled.
    missing = record.status == "ok" and {str(one["name"]) for one in request.profilers} - record.profiles.keys()
    return None if missing else record


def near(folder: Path) -> Path:
    """The folder as one would type it from here."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
