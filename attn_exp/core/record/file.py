"""The file of a record, `record.json` in its job's folder: written atomically, and checked when it is read.

`write_record` is called by worker/__main__.py and, for workers that died, by execution/job_queue.py and
sweep/parallel.py.
"""

from pathlib import Path

import msgspec

from attn_exp.core.errors import NOT_DECODED, RecordError, UserError
from attn_exp.core.files import read_whole, write_whole
from attn_exp.core.record.record import SCHEMA, Record
from attn_exp.core.record.request import DECODING
from attn_exp.core.record.soundness import check_environment, odd_times
from attn_exp.core.redaction import redacted, with_each_text

# The files in a job's folder beside its request.
FILE_NAME = "record.json"
LOG_NAME = "worker.log"
# The file that a duel adds to its folder.
VERDICTS_NAME = "duel.json"


def write_record(record: Record, folder: Path) -> None:
    """Write `record.json` into `folder` atomically, without secrets that a backend or a profiler quotes.

    The request is checked when it is made.
    """
    # Python reads a file's name that is no UTF-8 as characters that UTF-8 does not have; an error may quote it.
    tree = with_each_text(msgspec.to_builtins(record), lambda text: text.encode(errors="replace").decode())
    content = msgspec.json.encode(tree)
    # Texts are looked through one by one only if there is a secret among them.
    if redacted(content.decode()).encode() != content:
        others = {name: value for name, value in tree.items() if name != "request"}
        content = msgspec.json.encode(tree | with_each_text(others, redacted))
    write_whole(folder / FILE_NAME, msgspec.json.format(content, indent=1))


def read_record(folder: Path) -> Record | None:
    """Return the record in a job's folder, or None if there is none.

    Raises RecordError if the file cannot be read, or is not a record of this schema.
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

    Raises RecordError if it is not a record of this schema, or says what no record can (core/record/soundness.py).
    """
    try:
        with DECODING:
            record = msgspec.json.decode(content, type=Record)
        if record.schema != SCHEMA:
            raise RecordError(f"{path} has schema {record.schema}, this version reads {SCHEMA}")
        check_environment(record.environment)
        wrong = _wrong(record)
    except (*NOT_DECODED, UserError) as error:
        raise RecordError(f"{path} is not a record: {error}") from error
    if wrong is not None:
        raise RecordError(f"{path} is not a record: {wrong}")
    return record


def _wrong(record: Record) -> str | None:
    for name, measured in record.passes.items():
        if any(len(timing.times_us) != len(timing.rounds) for timing in measured.timings):
            return f"the samples of {name} are not one a round index"
    return odd_times(record.request.measuring.passes, record.metrics, ok=record.status == "ok")
