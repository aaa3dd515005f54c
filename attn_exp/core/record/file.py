"""The file of a record, `record.json` in its job's folder: written atomically, and checked when it is read.

`write_record` is called by worker/__main__.py and, for workers that died, by execution/job_queue.py and
sweep/parallel.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from attn_exp.core.errors import NOT_DECODED, RecordError, UserError
from attn_exp.core.files import read_whole, write_whole
from attn_exp.core.record.record import SCHEMA, Record
from attn_exp.core.record.request import DECODING
from attn_exp.core.redaction import redacted, with_each_text

# The files in a job's folder beside its request.
FILE_NAME = "record.json"
LOG_NAME = "worker.log"
# The file that a duel adds to its folder.
VERDICTS_NAME = "duel.json"
# Beyond it, ratios and products of a few numbers are no numbers any more. Nothing that is measured comes near.
_LARGEST = 1e100
_ROUNDED = 1 + 1e-9
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Number = Annotated[float, Meta(ge=0, le=_LARGEST)]
# `0-3,8`; six digits, since what reads it lists the numbers.
_Numbers = Annotated[str, Meta(pattern=r"^(\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?){0,999})?$")]


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

    Raises RecordError if it is not a record of this schema, or says what no record can.
    """
    try:
        with DECODING:
            record = msgspec.json.decode(content, type=Record)
        if record.schema != SCHEMA:
            raise RecordError(f"{path} has schema {record.schema}, this version reads {SCHEMA}")
        check_environment(record.environment)
        wrong = odd_times(record.request.measuring.passes, record.metrics, ok=record.status == "ok")
        for name, measured in record.passes.items():
            if any(len(timing.times_us) != len(timing.rounds) for timing in measured.timings):
                wrong = f"the samples of {name} are not one a round index"
    except (*NOT_DECODED, UserError) as error:
        raise RecordError(f"{path} is not a record: {error}") from error
    if wrong is not None:
        raise RecordError(f"{path} is not a record: {wrong}")
    return record


class Facts(msgspec.Struct, gc=False):
    """The entries of `environment` that are read, with their types. None and an absent entry are unknown."""

    host: str | None = None
    platform: str | None = None
    python: str | None = None
    cpu: str | None = None
    cpu_threads: _Count | None = None
    cpu_capability: str | None = None
    cpu_instruction_sets: str | None = None
    cpu_affinity: _Numbers | None = None
    cpu_governor: str | None = None
    numa_nodes: _Numbers | None = None
    matmul_precision: str | None = None
    versions: dict[str, str] = {}
    variables: dict[str, str] = {}
    git_commit: str | None = None
    tree: str | None = None
    measuring: str | None = None
    gpu: str | None = None
    gpu_uuid: str | None = None
    gpu_memory_bytes: _Count | None = None
    gpu_numa_node: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    multiprocessors: _Count | None = None
    l2_bytes: _Count | None = None
    compute_capability: str | None = None
    cuda: str | None = None
    cudnn: _Count | str | None = None
    driver: str | None = None
    power_limit_w: _Number | None = None
    max_sm_clock_mhz: _Number | None = None
    max_memory_clock_mhz: _Number | None = None
    event_floor_us: _Number | None = None
    event_quantum_us: _Number | None = None
    ecc: bool | None = None
    mig: bool | None = None
    matmul_tf32: bool | None = None
    cudnn_tf32: bool | None = None
    bf16_reduced_precision_reduction: bool | None = None
    fp16_reduced_precision_reduction: bool | None = None
    gradients_enabled: bool | None = None
    changed_settings: dict[str, str] = {}
    inputs: str | None = None
    nvml: str | None = None


def check_environment(environment: Mapping[str, Any]) -> None:
    """Check the environment of a record. Raises msgspec.ValidationError with the entry and what it should be."""
    msgspec.convert(environment, Facts)


def odd_times(passes: Sequence[str], metrics: Mapping[str, float], *, ok: bool) -> str | None:
    """Return why a record's times cannot be divided by and compared, or None."""
    for name, value in metrics.items():
        # Readers divide by these values, or take their logarithm.
        if not (value > 0 if name.endswith("/time_us") else value >= -_LARGEST) or value > _LARGEST:
            return f"metrics.{name}={value:g} is no possible value"
    for name in passes if ok else ():
        time = metrics.get(f"{name}/time_us")
        if time is None:
            return f"it is ok without a time of {name}"
        low, high = (metrics.get(f"{name}/time_{bound}_us", time) for bound in ("low", "high"))
        if not 0 < low <= time * _ROUNDED or not time <= high * _ROUNDED:
            return f"{name}/time_us={time:g} is outside of its own interval, {low:g} to {high:g}"
    return None
