"""The record: the result of one job, `record.json` in its folder. MLflow only shows copies of it.

`write_record` is called by worker/__main__.py, and by run/job_queue.py and sweep/parallel.py for workers that died.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from attn_exp.core.case import NORMAL, PASSES, Case
from attn_exp.core.errors import UserError, check_name
from attn_exp.core.files import owner_mark
from attn_exp.core.profile import Profile
from attn_exp.core.status import STATUSES, Status
from attn_exp.core.text import flat

SCHEMA = 1
METHOD_VERSION = "3"
# The files in a job's folder.
FILE_NAME = "record.json"
REQUEST_NAME = "request.yaml"
DUEL_NAME = "duel.yaml"
LOG_NAME = "worker.log"
# The file that a duel adds to its folder.
VERDICTS_NAME = "duel.json"

# What decoding a foreign file may raise, including endless nesting.
NOT_DECODED = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)


class RecordError(ValueError):
    """A file that is no record: truncated, of another schema, or of another shape. The message names the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """All samples of one call by one timer, in time order.

    Attributes:
        timer: the timer's name.
        l2: what the caches held before each call (see `Measuring`).
        times_us: the samples in microseconds; none is dropped.
        rounds: the index of each sample's round.
        stop_reason: why sampling ended: `precise`, `max_rounds`, `budget`, or `one_block` for a secondary timer.
        notes: calls per round and warm-up calls, and of `kernel` the union and span of a call's kernels in microseconds
            and the number of their streams.
        flags: what went wrong while sampling.
    """

    timer: str
    l2: str
    times_us: tuple[float, ...]
    rounds: tuple[int, ...]
    stop_reason: str
    notes: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel of a call: its name, its launches in one call, and its time in one call in microseconds."""

    name: str
    count: float
    time_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """The error of one tensor against the float32 reference. None stands for a value that is not finite.

    Attributes:
        relative: |x - ref| / |ref| (Euclidean norms).
        worst_row: the same for the worst row along the last dimension, relative to the larger of that row's norm and
            the root-mean-square row norm.
        max_abs: the largest difference.
        tolerance: the bound on `relative`, None if nothing was checked.
        row_tolerance: the bound on `worst_row`, None if nothing was checked.
        own_row: the same as `worst_row`, relative to each row's own norm; None if it is not checked.
        own_row_tolerance: the bound on `own_row`.
        worst_tile: |x - ref| / |ref| of the worst tile of 64 rows, or of its rows that were looked at.
        tile_tolerance: the bound on `worst_tile`.
        bias: <x, ref> / <ref, ref> - 1 of the head where it is furthest beyond its noise.
        bias_tolerance: the bound on the magnitude of `bias`.
        least_row: the least <x, ref> / <ref, ref> of a row that is not small: 1 if it is right, 0 if it is lost.
        least_row_tolerance: the least `least_row` that is allowed.
        where: of what is beyond its bound, the place, by field.
    """

    relative: float | None
    worst_row: float | None
    max_abs: float | None
    tolerance: float | None = None
    row_tolerance: float | None = None
    own_row: float | None = None
    own_row_tolerance: float | None = None
    worst_tile: float | None = None
    tile_tolerance: float | None = None
    bias: float | None = None
    bias_tolerance: float | None = None
    least_row: float | None = None
    least_row_tolerance: float | None = None
    where: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The form of a result: its dtype, shape and strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One call whose results were compared with the reference.

    Attributes:
        call: `first`, on the inputs of the seed; `hard`, on hard values; `alone`, of a block's attention without the
            block; `drawn`, a timed call that was chosen at
            random; `last`, one more call as the timer makes it.
        passes: the passes whose results were compared.
        index: which timed call of the pass it was, from 1 on; None for the others.
        of: how many calls the timer made of that pass by then.
        inputs: the distribution of the inputs, and what was changed in them.
        largest_score: the largest absolute score that the reference saw, before a softcap; None for a block.
        rows: how many rows of all compared tensors, of `rows_of`, were looked at.
        heads: in how many heads, those of every row of the batch; 0 for a block, which has none.
        form: of each compared tensor.
        overwritten: whether a later forward wrote over the output, as a CUDA graph's replay does; it is known of `hard`
            and `alone`.
    """

    call: Literal["first", "hard", "alone", "drawn", "last"]
    passes: tuple[str, ...]
    inputs: str
    index: int | None = None
    of: int | None = None
    largest_score: float | None = None
    rows: int = 0
    rows_of: int = 0
    heads: int = 0
    form: dict[str, Form] = field(default_factory=dict)
    overwritten: bool = False


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one pass of a block: `flops` in total, `attention_flops` of them, and the compulsory `bytes`."""

    flops: float
    attention_flops: float
    bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """What the kernels, copies and memsets of one traced call took; means over the traced calls, in microseconds.

    Attributes:
        sum_us: the sum of their durations.
        union_us: the time in which at least one of them ran.
        span_us: the time from the first start to the last end.
        streams: the numbers of the streams that they ran on.
        left_behind_us: the time in which some ran before the call's stream came to the call, or after it was through:
            work that the stream does not wait for.
        calls_differ: whether the traced calls ran different kernels.
    """

    sum_us: float = 0.0
    union_us: float = 0.0
    span_us: float = 0.0
    streams: tuple[int, ...] = ()
    left_behind_us: float = 0.0
    calls_differ: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstBackward:
    """Backwards that were each the first one of a new forward, and the repeated one that was timed, in turn.

    Attributes:
        first_us: the median time of the first ones in microseconds, by the device's plain timer.
        repeated_us: that of the repeated one.
        calls: how many calls of each; 0 where the memory did not hold a second graph, so that nothing was compared.
    """

    first_us: float | None = None
    repeated_us: float | None = None
    calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """The result of one pass, forward or backward.

    Attributes:
        first_call_s: seconds of the first call, compilation included.
        peak_memory_bytes: the pass's peak of GPU memory.
        errors: by tensor.
        kernels: the kernels of one call, longest first; on a CPU operators, nested ones included.
        activity: how their time was used; None on a CPU, and where records of the trace are missing.
        took: the kernel provider: the backend whose kernels ran, if the backend dispatches to others; else None. The
            name is the one in `record.json`.
        work: a block's work; None without a block, where the work follows from the case.
        timings: the ranking timer's samples, then those of secondary timers.
        first_backward: of the backward, whether the first one of a forward takes longer than repeated ones; else None.
    """

    first_call_s: float | None = None
    peak_memory_bytes: int | None = None
    errors: dict[str, TensorError] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()
    activity: Traced | None = None
    took: str | None = None
    work: Work | None = None
    timings: tuple[Timing, ...] = ()
    first_backward: FirstBackward | None = None


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The options that say how a job is measured.

    Attributes:
        timer: the timer that ranks.
        also: the secondary timers.
        precision: the relative half-width of the 95 % confidence interval to reach.
        min_rounds: the least number of rounds.
        max_rounds: the largest number of rounds.
        budget_s: seconds of sampling after which no new round starts.
        regime: `sustained` or `burst`.
        passes: `forward`, `backward`.
        seed: of the inputs.
        inputs: `normal`, or a kind of hard values (attn_exp/attention/hard_values.py).
        l2: what a GPU's caches hold before each call: `cold`, clean lines without the call's data, or `written`, dirty
            lines of other data. On a CPU it is `warm`, what the previous call left.
    """

    timer: str
    also: tuple[str, ...]
    precision: float
    min_rounds: int
    max_rounds: int
    budget_s: float
    regime: Literal["sustained", "burst"]
    passes: tuple[str, ...]
    seed: int
    l2: str = "cold"
    inputs: str = NORMAL


@dataclass(frozen=True, kw_only=True)
class Compile:
    """How a backend's attention goes through torch.compile.

    Attributes:
        mode: `none`, or a mode of Inductor.
        fullgraph: whether a graph break is refused.
        options: more options of Inductor.
    """

    mode: str = "none"
    fullgraph: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def backend_label(name: str, compile_: Compile, providers: Iterable[str | None] = ()) -> str:
    """Return a backend's name in tables: `flash`, `flex+max-autotune`, `auto (cudnn)`.

    The compile mode belongs to the name because compiling makes it another competitor.

    Args:
        name: the backend's name.
        compile_: how its attention was compiled.
        providers: for each pass, the backend whose kernels a dispatching backend ran.
    """
    label = name if compile_.mode == "none" else f"{name}+{compile_.mode}"
    # A backend that ran its own kernels adds nothing to its name.
    others = dict.fromkeys(provider for provider in providers if provider and provider != name)
    return f"{label} ({', '.join(others)})" if others else label


def settings(backend: Mapping[str, Any], compile_: Compile, *, caches: bool) -> dict[str, Any]:
    """Return the options of backend and compiler, and whether the compiler may read its caches, under dotted names."""
    compiler = flat({"fullgraph": compile_.fullgraph, **compile_.options}, "compile.")
    return flat(backend) | compiler | {"caches": caches}


@dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """What Dynamo did in a job: `graphs`, `breaks` by reason, and how often it compiled a frame again."""

    graphs: int
    breaks: dict[str, int]
    recompilations: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """One job that the parent gives a worker, written as `request.yaml` into the job's folder.

    `caches`, which lets compilers read what earlier processes compiled, is part of a job's identity, and so is the hash
    in `source`. `profilers`, `profiler_limit_mb`, `label` and `config` are not.

    Attributes:
        source: where a backend from elsewhere comes from, as core/source.py finds it; empty for those of this package.
        profilers: the profilers to run after timing, each with `name`, `_target_` and its options.
        profiler_limit_mb: the largest file that a profiler may leave.
        config: the composed configuration.
    """

    job: str
    sweep: str
    model: str
    device: str
    case: Case
    backend: dict[str, Any]
    measuring: Measuring
    compile: Compile = field(default_factory=Compile)
    caches: bool = True
    source: dict[str, str] = field(default_factory=dict)
    gpu_uuid: str | None = None
    profilers: tuple[dict[str, Any], ...] = ()
    profiler_limit_mb: float = 256.0
    label: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UserError for a name that leads out of a folder: requests and records may come from others."""
        check_name("job", self.job)
        check_name("sweep", self.sweep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The result of one job.

    Attributes:
        reason: one sentence, if and only if `status` is not `ok`.
        metrics: numbers by name, if and only if `status` is `ok`.
        ceilings: the machine's measured FLOP/s and bytes/s for the case's dtype.
        canaries: microseconds of fixed work (`sleep`, `copy`, `matmul`, `sdpa`), measured once for each worker. If they
            differ between two runs, the machine has changed.
        compiled: None if nothing was compiled.
        notes: the backend's own figures: workspace bytes, build times.
        profiles: the results of profilers, by name.
        judged: the calls whose results were compared with the reference.
    """

    request: Request
    status: Status
    reason: str | None = None
    passes: dict[str, PassRecord] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    canaries: dict[str, float] = field(default_factory=dict)
    compiled: CompileRecord | None = None
    notes: dict[str, float] = field(default_factory=dict)
    telemetry: tuple[dict[str, Any], ...] = ()
    stages_s: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    judged: tuple[Judged, ...] = ()
    started_at: float = 0.0
    finished_at: float = 0.0
    schema: int = SCHEMA
    method_version: str = METHOD_VERSION

    @property
    def final(self) -> bool:
        """Whether the status is final: the same command does not run the job again."""
        return STATUSES[self.status].final

    @property
    def label(self) -> str:
        """Return the backend's name in tables: `flash`, `flex+max-autotune`, `auto (cudnn)`."""
        providers = [measured.took for measured in self.passes.values()]
        return backend_label(str(self.request.backend.get("name", "?")), self.request.compile, providers)

    def lacking(self, request: Request) -> list[str]:
        """Return the names of a request's profilers that the record has no profile of."""
        return [str(one["name"]) for one in request.profilers if one["name"] not in self.profiles]

    @property
    def device_name(self) -> str:
        """Return the GPU's name, or the processor's on a CPU; empty if the device was not opened."""
        return str(self.environment.get("gpu") or self.environment.get("cpu") or "")


def write_record(record: Record, folder: Path) -> None:
    """Write `record.json` into `folder` atomically."""
    write_whole(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(record), indent=1))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader never sees half of it, even after a power failure."""
    temporary = path.with_name(f".{path.name}{owner_mark()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_record(folder: Path) -> Record | None:
    """Return the record in a job's folder, or None if there is none.

    Raises:
        RecordError: the file cannot be read, or is not a record of this schema.
    """
    path = folder / FILE_NAME
    try:
        content = path.read_bytes()
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
        record = msgspec.json.decode(content, type=Record)
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
