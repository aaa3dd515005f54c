"""Results: records decoded without their samples. Tables, plots, pages and comparisons take results."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.case.case import Case
from attn_exp.core.catalogue import About, later_options, recorded_about
from attn_exp.core.errors import NOT_DECODED, RecordError, UserError, check_name
from attn_exp.core.record.file import FILE_NAME, check_environment, odd_times, read_record
from attn_exp.core.record.flags import flags_in, others_cores
from attn_exp.core.record.record import SCHEMA, Disagreement, Paired, Record
from attn_exp.core.record.request import Compile, Measuring, backend_label, settings
from attn_exp.core.record.status import Status, is_final
from attn_exp.core.source import short
from attn_exp.core.text import unique_labels

# The data that a sweep's records share are decoded once: thousands of records have only a few environments and cases.
_KEPT = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One job's record without its samples; `record()` reads the whole record.

    `label` names the backend in tables (`named` makes labels unique), `l2` says whether the primary timer flushed the
    L2 cache (`cold`, `warm`, or empty if nothing was timed). `kernels` are the names of each pass' kernels, the
    longest-running first, `launches` how often a call launches each, `others` how many processors other programs used
    if the result is unstable, `profiles` the profilers that ran, `second_opinions` says which timers disagree.
    `pass_flags` are the flags that follow from each pass's own samples. `paired` says of each pass that was measured in
    turns how it compares with its base, without the base's samples. Results of two sweeps that have the same `key`
    (case, backend with options, compiler, kind of device) are joined in comparisons. `source` says where a backend from
    elsewhere comes from (core/source.py); it is not in `key`, so that two states of one are compared.
    """

    job: str
    sweep: str
    model: str
    device: str
    label: str
    case: Case
    backend: Mapping[str, Any]
    about: About
    compile: Compile
    measuring: Measuring
    status: Status
    reason: str | None
    metrics: Mapping[str, float]
    flags: tuple[str, ...]
    environment: Mapping[str, Any]
    ceilings: Mapping[str, float]
    l2: str
    kernels: Mapping[str, tuple[str, ...]]
    launches: Mapping[str, tuple[int, ...]]
    others: float
    profiles: tuple[str, ...]
    second_opinions: tuple[str, ...]
    pass_flags: Mapping[str, tuple[str, ...]]
    paired: Mapping[str, Paired]
    started_at: float
    finished_at: float
    method_version: str
    path: Path
    caches: bool
    source: Mapping[str, str]
    key: tuple[Any, ...]

    @property
    def device_name(self) -> str:
        """The name of the GPU, or of the processor for CPU jobs; empty if the job never reached a device."""
        return str(self.environment.get("gpu") or self.environment.get("cpu") or "")

    @property
    def final(self) -> bool:
        """Whether running the job again could not change the outcome."""
        return is_final(self.status, self.environment)

    def flags_in(self, direction: str) -> tuple[str, ...]:
        """Return the flags without those that only another pass has."""
        return flags_in(self.flags, self.pass_flags, direction)

    def longest_kernel(self, direction: str) -> str:
        """Return the name of the kernel in which a pass spends most of its time; empty if no kernel is known."""
        return next(iter(self.kernels.get(direction, ())), "")

    def record(self) -> Record:
        """Read the whole record, samples included. Raises RecordError if its file was deleted or damaged."""
        record = read_record(self.path.parent)
        if record is None:
            raise RecordError(f"{self.path} was deleted meanwhile")
        return record


def named(results: Sequence[Result]) -> list[Result]:
    """Return the results with unique labels: those of `by_source`, with options where two share one."""
    return by_options(by_source(results))


def by_source(results: Sequence[Result]) -> list[Result]:
    """Return the results with labels such as `mine@1a2b3c4` where one name stands for several sources of a backend."""
    hashes: dict[str, set[str]] = {}
    for result in results:
        hashes.setdefault(result.label, set()).add(short(result.source))
    return [
        replace(result, label=f"{result.label}@{short(result.source) or 'unknown'}")
        if len(hashes[result.label]) > 1
        else result
        for result in results
    ]


def by_options(results: Sequence[Result]) -> list[Result]:
    """Return the results with the options that differ in the labels of those that share one."""
    each = [settings(result.backend, result.compile, caches=result.caches) for result in results]
    labels = unique_labels([result.label for result in results], each)
    return [
        result if result.label == label else replace(result, label=label)
        for result, label in zip(results, labels, strict=True)
    ]


def result_of(record: Record, path: Path = Path(FILE_NAME)) -> Result:
    """Return the result of a record in memory; `path` is where its file lies, which `Result.record` reads."""
    return decode(msgspec.json.encode(record), path)


def decode(content: bytes, path: Path) -> Result:
    """Decode the content of a record file; `path` is named in messages.

    Raises RecordError if the content is not a record of this schema.
    """
    try:
        lean = _LEAN.decode(content)
        if lean.schema != SCHEMA:
            raise RecordError(f"{path} has schema {lean.schema}, this version reads {SCHEMA}")
        request = lean.request
        check_name("job", request.job)
        check_name("sweep", request.sweep)
        case = _decoded(bytes(request.case), Case)
        backend, backend_key = _options(bytes(request.backend))
        compiled, compile_key = _compile(bytes(request.compile))
        measuring = _decoded(bytes(request.measuring), Measuring)
        environment = _environment(bytes(lean.environment)) if lean.environment else {}
        ceilings = _decoded(bytes(lean.ceilings), dict[str, float]) if lean.ceilings else {}
        if wrong := odd_times(measuring.passes, lean.metrics, ok=lean.status == "ok"):
            raise RecordError(f"{path} is not a record: {wrong}")
        timings = [timing for measured in lean.passes.values() for timing in measured.timings[:1]]
        kernels = {
            direction: sorted(measured.kernels, key=lambda kernel: -kernel.time_us)
            for direction, measured in lean.passes.items()
            if measured.kernels
        }
        return Result(
            job=request.job,
            sweep=request.sweep,
            model=request.model,
            device=request.device,
            label=backend_label(backend["name"], compiled, [measured.took for measured in lean.passes.values()]),
            case=case,
            # Not in `key`: records have no option that is younger.
            backend=later_options().get(str(backend.get("_target_")), {}) | backend,
            about=recorded_about(backend["name"], lean.request.config.backend.about),
            compile=compiled,
            measuring=measuring,
            status=lean.status,
            reason=lean.reason,
            metrics=lean.metrics,
            flags=lean.flags,
            environment=environment,
            ceilings=ceilings,
            l2=timings[0].l2 if timings else "",
            kernels={direction: tuple(sys.intern(kernel.name) for kernel in ran) for direction, ran in kernels.items()},
            launches={direction: tuple(round(kernel.count) for kernel in ran) for direction, ran in kernels.items()},
            others=_others(bytes(lean.telemetry)) if "unstable" in lean.flags and lean.telemetry else 0.0,
            profiles=tuple(lean.profiles),
            second_opinions=tuple(
                f"{direction}: {pair}" for direction, measured in lean.passes.items() for pair in measured.disagreements
            ),
            pass_flags={direction: measured.flags for direction, measured in lean.passes.items()},
            paired={
                direction: Paired(base=turn.base, log_ratio=turn.log_ratio, half=turn.half, rounds=turn.rounds)
                for direction, measured in lean.passes.items()
                if (turn := measured.paired) is not None
            },
            started_at=lean.started_at,
            finished_at=lean.finished_at,
            method_version=lean.method_version,
            path=path,
            caches=request.caches,
            source=_decoded(bytes(request.source), dict[str, str]) if request.source else {},
            key=(case, backend_key, compile_key, request.device, request.caches),
        )
    except (*NOT_DECODED, UserError) as error:
        schema = _schema(content)
        if schema not in (None, SCHEMA):
            raise RecordError(f"{path} has schema {schema}, this version reads {SCHEMA}") from error
        raise RecordError(f"{path} is not a record: {error}") from error


class _Timing(msgspec.Struct, gc=False):
    l2: str


class _Kernel(msgspec.Struct, gc=False):
    name: str
    time_us: float
    count: float = 1.0


class _Paired(msgspec.Struct, gc=False):
    base: str
    log_ratio: float = 0.0
    half: float = 0.0
    rounds: int = 0


class _Pass(msgspec.Struct, gc=False):
    timings: list[_Timing] = []
    paired: _Paired | None = None
    kernels: list[_Kernel] = []
    took: str | None = None
    disagreements: list[Disagreement] = []
    flags: tuple[str, ...] = ()


class _Backend(msgspec.Struct, gc=False, frozen=True):
    about: Any = None


class _Config(msgspec.Struct, gc=False, frozen=True):
    backend: _Backend = _Backend()


class _Request(msgspec.Struct, gc=False):
    job: str
    sweep: str
    model: str
    device: str
    case: msgspec.Raw
    backend: msgspec.Raw
    measuring: msgspec.Raw
    compile: msgspec.Raw = msgspec.Raw()
    caches: bool = True
    source: msgspec.Raw = msgspec.Raw()
    config: _Config = _Config()


class _Lean(msgspec.Struct, gc=False):
    """The fields of a record that a result keeps. msgspec skips all others, above all the samples, without parsing."""

    request: _Request
    status: Status
    reason: str | None = None
    passes: dict[str, _Pass] = {}
    metrics: dict[str, float] = {}
    flags: tuple[str, ...] = ()
    environment: msgspec.Raw = msgspec.Raw()
    ceilings: msgspec.Raw = msgspec.Raw()
    telemetry: msgspec.Raw = msgspec.Raw()
    profiles: dict[str, msgspec.Raw] = {}
    started_at: float = 0.0
    finished_at: float = 0.0
    schema: int = SCHEMA
    method_version: str = ""


def _others(telemetry: bytes) -> float:
    readings = msgspec.json.decode(telemetry)
    return others_cores(readings[0], readings[-1]) if readings else 0.0


class _Schema(msgspec.Struct):
    schema: int | None = None


_LEAN = msgspec.json.Decoder(_Lean)


@lru_cache(_KEPT)
def _decoded(raw: bytes, kind: Any) -> Any:
    return msgspec.json.decode(raw, type=kind)


@lru_cache(_KEPT)
def _compile(raw: bytes) -> tuple[Compile, tuple[Any, ...]]:
    """Return how a backend is compiled, the default if nothing is recorded, and what that is in a `Result.key`."""
    compile_ = msgspec.json.decode(raw, type=Compile) if raw else Compile()
    return compile_, (compile_.mode, compile_.fullgraph, json.dumps(compile_.options, sort_keys=True), compile_.name)


@lru_cache(_KEPT)
def _options(raw: bytes) -> tuple[dict[str, Any], str]:
    """Return a backend with its options, and what they are in a `Result.key`."""
    options = msgspec.json.decode(raw, type=dict[str, Any])
    return options, json.dumps(options, sort_keys=True)


@lru_cache(_KEPT)
def _environment(raw: bytes) -> dict[str, Any]:
    environment = msgspec.json.decode(raw, type=dict[str, Any])
    check_environment(environment)
    return environment


def _schema(content: bytes) -> int | None:
    try:
        return msgspec.json.decode(content, type=_Schema).schema
    except NOT_DECODED:
        return None
