"""The record: the result of one job. MLflow only shows copies of it; core/record/file.py writes and reads it."""

from dataclasses import dataclass, field
from typing import Any

from attn_exp.core.record.checked import Bitwise, Judged, TensorError
from attn_exp.core.record.profile import Profile
from attn_exp.core.record.request import Request, backend_label
from attn_exp.core.record.status import Status, is_final
from attn_exp.core.record.window import Window
from attn_exp.core.text import figures

SCHEMA = 1
METHOD_VERSION = "5"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """All samples of one call by one timer, in time order.

    Attributes:
        timer: the timer's name.
        l2: the content of the caches before each call (see `Measuring`).
        times_us: the samples in microseconds; none is dropped.
        rounds: the index of each sample's round.
        stop_reason: why sampling ended: `precise`, `max_rounds`, `budget`, or `one_block` for a secondary timer.
        notes: calls per round, warm-up calls, and seconds of load right before the first round. A GPU adds `duty`, the
            share of sampled time in which calls and flushes ran; `cpu` adds the calls per sample. `kernel` adds the
            union and span of a call's kernels in microseconds and the number of their streams.
        flags: problems while sampling.
        blocks: the round, begin and end of each block of calls, in seconds since 1970. A round is one block.
        clocks_mhz: the mean SM clock of each block, by stamps on the GPU before and after it; empty if unknown.
        uncounted: the clock and the samples of each block that was repeated because its clock was below the highest.
    """

    timer: str
    l2: str
    times_us: tuple[float, ...]
    rounds: tuple[int, ...]
    stop_reason: str
    notes: dict[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    blocks: tuple[tuple[int, float, float], ...] = ()
    clocks_mhz: tuple[float, ...] = ()
    uncounted: tuple[tuple[float, tuple[float, ...]], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel of a call: its name, its launches in one call, and its time in one call in microseconds."""

    name: str
    count: float
    time_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """How a pass compares with the same pass of the job `base`, with which it was measured in turns.

    Two jobs whose chains of bases end at the same job compare by the difference of their sums of `log_ratio`.

    Attributes:
        base: the name of the job; the job's own name if the others are compared with it.
        log_ratio: the median over rounds of log(time / time of the base).
        half: the half-width of its 95 % interval.
        rounds: how many rounds both have.
        timing: the samples of the base if it was measured before and again beside this job; else its record has them.
    """

    base: str
    log_ratio: float = 0.0
    half: float = 0.0
    rounds: int = 0
    timing: Timing | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one pass of a block: `flops` in total, `attention_flops` of them, and the compulsory `bytes`."""

    flops: float
    attention_flops: float
    bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """The time of the kernels, copies and memsets of a traced call: means over the traced calls, in microseconds.

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
class Disagreement:
    """Two timers of one pass whose medians in microseconds differ by more than both their intervals and a floor.

    `low` and `high` bound how much more time `other` has than `one`: 0.1 is 10 %.
    """

    one: str
    other: str
    one_us: float
    other_us: float
    low: float
    high: float

    def __str__(self) -> str:
        off = self.other_us / self.one_us - 1
        return (
            f"{self.other} has {figures(self.other_us)} us and {self.one} {figures(self.one_us)} us, "
            f"{100 * abs(off):.1f} % {'more' if off > 0 else 'less'} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """The result of one pass, forward or backward.

    Attributes:
        first_call_s: seconds of the first call, compilation included; of a forward with those of the backend's import,
            of `unsupported` and of `prepare`.
        peak_memory_bytes: the peak of the call's memory in PyTorch's allocator: inputs, what the backend keeps, what
            the call allocates, and of the backward what the forward saved.
        outside_memory_bytes: device memory taken since before the backend was loaded that PyTorch's allocator does not
            know, by the driver's count.
        workspace_bytes: what the call allocates and does not keep, and the size of the workspace that the backend
            names; on a CPU the latter alone.
        mask_build_us: the median time to build the mask's data, of the first requested pass, since all passes share it.
        mask_build_bytes: the peak of what building it takes in PyTorch's allocator; None on a CPU.
        errors: the error of each tensor.
        kernels: the kernels of one call, longest first; on a CPU operators, nested ones included.
        activity: the use of their time; None on a CPU, and if records of the trace are missing.
        took: the kernel provider: the backend whose kernels ran, if the backend dispatches to others; else None. The
            name is the one in `record.json`.
        work: a block's work; None without a block, where the work follows from the case.
        timings: the ranking timer's samples, then those of secondary timers.
        paired: the comparison with the rival that the others of its turns are compared with; None if the job was
            measured alone.
        disagreements: the pairs of timers that contradict each other.
        flags: the flags of the record that follow from the pass's own samples.
        window: clock, power and energy while the ranking timer's blocks ran.
        reads_free_slots: whether a NaN in memory that belongs to no request reaches the output; None if there is none.
        bitwise: whether results have the same bits, by what changes between them: `calls`, `positions`, `batch_sizes`,
            `kv_splits`. Empty unless `determinism=true` asked for it; what a case or backend does not have is absent.
    """

    first_call_s: float | None = None
    peak_memory_bytes: int | None = None
    outside_memory_bytes: int | None = None
    workspace_bytes: int | None = None
    mask_build_us: float | None = None
    mask_build_bytes: int | None = None
    errors: dict[str, TensorError] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()
    activity: Traced | None = None
    took: str | None = None
    work: Work | None = None
    timings: tuple[Timing, ...] = ()
    paired: Paired | None = None
    disagreements: tuple[Disagreement, ...] = ()
    flags: tuple[str, ...] = ()
    window: Window | None = None
    reads_free_slots: bool | None = None
    bitwise: dict[str, Bitwise] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompileRecord:
    """Dynamo's work in a job: `graphs`, `breaks` by reason, and how often it compiled a frame again."""

    graphs: int
    breaks: dict[str, int]
    recompilations: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The result of one job.

    Attributes:
        reason: one sentence, if and only if `status` is not `ok`.
        metrics: numbers by name, if and only if `status` is `ok`.
        ceilings: the machine's measured FLOP/s and bytes/s for the case's dtype.
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
        return is_final(self.status, self.environment)

    @property
    def label(self) -> str:
        """Return the backend's name in tables: `flash`, `flex+max-autotune`, `auto (cudnn)`."""
        providers = [measured.took for measured in self.passes.values()]
        return backend_label(str(self.request.backend.get("name", "?")), self.request.compile, providers)

    def lacking(self, request: Request) -> list[str]:
        """Return the names of a request's profilers that the record has no profile of."""
        return [str(profiler["name"]) for profiler in request.profilers if profiler["name"] not in self.profiles]

    @property
    def device_name(self) -> str:
        """Return the GPU's name, or the processor's on a CPU; empty if the device was not opened."""
        return str(self.environment.get("gpu") or self.environment.get("cpu") or "")
