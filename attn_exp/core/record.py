"""The record: all that one job leaves, as `record.json` in the job's folder. The truth; MLflow is a view of it."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from attn_exp.core.case import PASSES, Case
from attn_exp.core.errors import UserError, check_name
from attn_exp.core.files import owner_mark
from attn_exp.core.profile import Profile
from attn_exp.core.status import STATUSES, Status
from attn_exp.core.text import flat

SCHEMA = 1
METHOD_VERSION = "2"
# What lies in a job's folder.
FILE_NAME = "record.json"
REQUEST_NAME = "request.yaml"
DUEL_NAME = "duel.yaml"
LOG_NAME = "worker.log"
# What a duel adds to its own folder.
VERDICTS_NAME = "duel.json"

# What decoding may raise for bytes that somebody else wrote; nesting without end is among them.
NOT_DECODED = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)


class RecordError(ValueError):
    """A file that is no record: cut short, of another schema, or of another shape. The message names the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Samples of one call by one timer, in time order, none dropped.

    `times_us` are microseconds, `rounds` the index of each sample's round. `stop_reason` says why sampling ended
    (`precise`, `max_rounds`, `budget`, or `one_block` for a second opinion), `l2` what caches held before each call
    (see `Measuring`).
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
    """One kernel of a call: its name, how often it ran in one call, and its time in one call in microseconds."""

    name: str
    count: float
    time_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """How far one tensor is from the float32 reference.

    `relative` is |x - ref| / |ref| (Euclidean), `worst_row` the same for the worst row along the last dimension
    (over the larger of that row's norm and the root-mean-square row norm), `max_abs` the largest difference. None
    stands for a value that is not finite. `tolerance` and `row_tolerance` are the bounds on `relative` and `worst_row`,
    None if nothing was judged.
    """

    relative: float | None
    worst_row: float | None
    max_abs: float | None
    tolerance: float | None = None
    row_tolerance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one pass of a block does: `flops` in all, `attention_flops` of them, and the `bytes` that must move."""

    flops: float
    attention_flops: float
    bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """What one pass (forward or backward) left.

    `took` is the kernel provider: the backend whose kernels ran, of a backend that dispatches to others; None
    otherwise. Its name is the one that `record.json` has. `work` is None for attention without a block, whose work
    follows from its case.
    """

    first_call_s: float | None = None
    peak_memory_bytes: int | None = None
    errors: dict[str, TensorError] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()
    took: str | None = None
    work: Work | None = None
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The options that say how a job is measured. Times in seconds; `precision` is the relative half-width aimed at.

    `l2` is what a GPU's caches hold before each call: `cold`, nothing of the call and nothing to be stored, or
    `written`, lines of another's that still have to be. On a CPU it is `warm`: what the last call left.
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


@dataclass(frozen=True, kw_only=True)
class Compile:
    """How a backend's attention goes through torch.compile: `mode` none, or Inductor's, with more Inductor `options`.

    With `fullgraph` a graph break is a refusal.
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
    """The options of a backend, those of its compiler, and whether that may read its caches, under dotted names."""
    compiler = flat({"fullgraph": compile_.fullgraph, **compile_.options}, "compile.")
    return flat(backend) | compiler | {"caches": caches}


@dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """What Dynamo made of a job: `graphs`, `breaks` by reason, and how often it had to compile a frame again."""

    graphs: int
    breaks: dict[str, int]
    recompilations: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the parent asks of a worker: one job. Written as `request.yaml` into the job's folder.

    `caches` lets compilers read what earlier processes compiled. `profilers` are those to run after the timing, each
    with its `name`, `_target_` and options, `profiler_limit_mb` is the largest file that one may leave; neither is
    part of what makes two jobs the same.
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
    gpu_uuid: str | None = None
    profilers: tuple[dict[str, Any], ...] = ()
    profiler_limit_mb: float = 256.0
    label: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UserError for a name that could lead out of a folder: requests and records may be somebody else's."""
        check_name("job", self.job)
        check_name("sweep", self.sweep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """All that a job leaves. `metrics` has entries if and only if `status` is `ok`, a `reason` if and only if not.

    `notes` are the backend's own figures (workspace bytes, plan building), `compiled` is None if nothing was.
    `canaries` are microseconds of fixed work (`sleep`, `copy`, `matmul`, `sdpa`), measured once a worker: what they
    differ by between two sessions is the session's. `profiles` are what profilers found after the timing, by name.
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
    started_at: float = 0.0
    finished_at: float = 0.0
    schema: int = SCHEMA
    method_version: str = METHOD_VERSION

    @property
    def final(self) -> bool:
        """Whether running the job again could not change the outcome."""
        return STATUSES[self.status].final

    @property
    def label(self) -> str:
        """Who computed it, as tables say: `flash`, `flex+max-autotune`, `auto (cudnn)`."""
        providers = [measured.took for measured in self.passes.values()]
        return backend_label(str(self.request.backend.get("name", "?")), self.request.compile, providers)

    def lacking(self, request: Request) -> list[str]:
        """The profilers of a request that the record has no profile of."""
        return [str(one["name"]) for one in request.profilers if one["name"] not in self.profiles]

    @property
    def device_name(self) -> str:
        """The GPU's name, or the processor's where none measured; empty if the job got nowhere."""
        return str(self.environment.get("gpu") or self.environment.get("cpu") or "")


def write_record(record: Record, folder: Path) -> None:
    """Write `record.json` into `folder`, whole or not at all: to a temporary file, then renamed."""
    write_whole(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(record), indent=1))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; a reader never sees half of it, also after a power cut."""
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
    """The record in a job's folder, or None if there is none.

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
    """The record in a job's folder; None if there is none, or none that can be read."""
    try:
        return read_record(folder)
    except RecordError:
        return None


def decode_record(content: bytes, path: Path) -> Record:
    """The record that a file's content is; `path` is for messages.

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
