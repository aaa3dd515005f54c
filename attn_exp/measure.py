"""Measure: one job from its request to its record. The flow of the worker; every step's own work is elsewhere."""

import contextlib
import re
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_exp.accuracy import inaccuracy, tensor_error
from attn_exp.backends.base import Backend, Calls, Unavailable, load_backend
from attn_exp.backends.reference import reference
from attn_exp.ceilings import copy_ceiling, matmul_ceiling, synchronize
from attn_exp.environment import environment
from attn_exp.flags import telemetry_flags, timing_flags
from attn_exp.hardware import datasheet_peak
from attn_exp.inputs import DISTRIBUTION, Inputs, make_inputs
from attn_exp.metrics import implausibility, pass_metrics
from attn_exp.nvml import GpuState
from attn_exp.preload import import_autograd, load_libraries
from attn_exp.record import Kernel, PassRecord, Record, Request, Status, TensorError, Timing
from attn_exp.timers import make_timer
from attn_exp.timers.gpu import Cuda
from attn_exp.timers.kernel import ProfilerLost, operators, trace
from attn_exp.timers.loop import Call, StoppingRule, Timer, sample, single_block

LOAD_S = 2.0
_TRACED_CALLS = 2
_KERNELS_KEPT = 24
_SECOND_OPINION_US = 15_000.0
_SECOND_OPINION_CALLS = (4, 20)
# How PyTorch's allocator on a CPU words it; on a GPU it raises torch.OutOfMemoryError.
_CPU_MEMORY_ERROR = re.compile(r"DefaultCPUAllocator|can't allocate memory|not enough memory")


@dataclass
class Machine:
    """What a worker keeps from job to job: device, clocks, ceilings, and the last case's reference."""

    device: str
    gpu: Cuda | None = None
    state: GpuState | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)
    reference: tuple[Any, dict[str, torch.Tensor]] | None = None

    @classmethod
    def open(cls, device: str) -> "Machine":
        """Take possession of the device: context, flush buffer, NVML."""
        imports = import_autograd()
        if device != "cuda":
            imports.join()
            return cls(device, environment=environment(device))
        if not torch.cuda.is_available():
            raise Unavailable(
                f"PyTorch {torch.__version__} sees no CUDA device: install a CUDA build of torch, or set device=cpu"
            )
        machine = cls(device, gpu=Cuda(), environment=environment(device))
        try:
            machine.state = GpuState(machine.environment["gpu_uuid"])
            machine.environment |= machine.state.constant()
        except Exception as error:  # NVML's absence costs telemetry, not the measurement; the record says so
            machine.environment["nvml"] = f"no telemetry: {error}"
        return machine

    def ceilings_for(self, dtype: str) -> dict[str, float]:
        """The machine's measured ceilings for inputs of `dtype`.

        On a GPU the first ask also puts it under load for seconds, and uses them to load libraries on the host.
        """
        if dtype not in self.ceilings:
            first = next(iter(self.ceilings.values()), None)
            if self.gpu is None or first:
                matmul = matmul_ceiling(self.device, dtype, 0.0)
            else:
                with ThreadPoolExecutor(1) as pool:
                    loading = pool.submit(matmul_ceiling, self.device, dtype, LOAD_S)
                    load_libraries(dtype)
                    matmul = loading.result()
            copy = first["copy_bytes_per_s"] if first else copy_ceiling(self.device)
            self.ceilings[dtype] = {"copy_bytes_per_s": copy, "matmul_flops_per_s": matmul}
        return self.ceilings[dtype]

    def reference_for(self, request: Request, inputs: Inputs, *, with_gradients: bool) -> dict[str, torch.Tensor]:
        """The float32 reference, kept for the next rival of the same case."""
        key = (request.case, request.measuring.seed, with_gradients)
        if self.reference is None or self.reference[0] != key:
            self.reference = None
            self.reference = key, reference(request.case, inputs, with_gradients=with_gradients)
        return self.reference[1]

    def forget_other_case(self, request: Request, *, with_gradients: bool) -> None:
        """Free the kept reference unless this job can use it."""
        if self.reference and self.reference[0] != (request.case, request.measuring.seed, with_gradients):
            self.reference = None


class Stopped(Exception):
    """The job ends here with a status that is not `ok`."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


@dataclass
class _Job:
    """A job under way: what will become its record."""

    request: Request
    passes: dict[str, PassRecord] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    ceilings: dict[str, float] = field(default_factory=dict)
    telemetry: list[dict[str, Any]] = field(default_factory=list)
    stages_s: dict[str, float] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stages_s[name] = self.stages_s.get(name, 0.0) + time.perf_counter() - began

    def record(self, status: Status, reason: str | None, found: dict[str, Any]) -> Record:
        return Record(
            request=self.request,
            status=status,
            reason=reason,
            passes=self.passes,
            metrics=self.metrics if status == "ok" else {},
            flags=tuple(sorted(self.flags)),
            environment=found,
            ceilings=self.ceilings,
            telemetry=tuple(reading for reading in self.telemetry if reading),
            stages_s={name: round(seconds, 6) for name, seconds in self.stages_s.items()},
            started_at=self.started_at,
            finished_at=time.time(),
        )


def measure(request: Request, machine: Machine) -> Record:
    """Measure one job. Whatever goes wrong becomes the record's status; only the death of the process escapes."""
    job = _Job(request)
    found = machine.environment | {"inputs": DISTRIBUTION, "gradients_enabled": _with_gradients(request)}
    try:
        _measure(job, machine)
    except Stopped as stopped:
        return job.record(stopped.status, stopped.reason, found)
    except Unavailable as error:
        return job.record("unavailable", str(error), found)
    except ImportError as error:
        return job.record("unavailable", f"a package is missing: {error}", found)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return job.record("out_of_memory", _sentence(error), found)
    except Exception as error:  # a backend may raise anything, and it must end as a status, not as a dead worker
        traceback.print_exc()
        memory = _CPU_MEMORY_ERROR.search(str(error)) is not None
        return job.record("out_of_memory" if memory else "error", _sentence(error), found)
    return job.record("ok", None, found)


def _measure(job: _Job, machine: Machine) -> None:
    request, case, device = job.request, job.request.case, machine.device
    with_gradients = _with_gradients(request)
    backend = load_backend(request.backend)
    with job.stage("unsupported"):
        reason = backend.unsupported(case, device)
    if reason is not None:
        raise Stopped("unsupported", reason)
    with job.stage("ceilings"):
        job.ceilings = machine.ceilings_for(case.dtype)
    with job.stage("inputs"):
        machine.forget_other_case(request, with_gradients=with_gradients)
        held_before = _held_bytes(device)
        inputs = make_inputs(case, device, request.measuring.seed, with_gradients=with_gradients)
        synchronize(device)
    with job.stage("accuracy"):
        # Before the backend runs: one that writes into its inputs must not spoil what it is judged by.
        before = _held_bytes(device)
        expected = machine.reference_for(request, inputs, with_gradients=with_gradients)
        synchronize(device)
        held_before += _held_bytes(device) - before
    began = time.perf_counter()
    with job.stage("first_call"):
        calls = backend.prepare(case, inputs)
    prepared_s = time.perf_counter() - began
    with calls.scope():
        timed, tensors, first_s = _first_calls(job, calls, device, prepared_s)
        with job.stage("accuracy"):
            errors = _errors(request, tensors, expected)
        del tensors
        for direction in request.measuring.passes:
            job.passes[direction] = PassRecord(first_call_s=first_s[direction], errors=errors[direction])
        wrong = inaccuracy({name: error for found in errors.values() for name, error in found.items()})
        if wrong:
            raise Stopped("inaccurate", wrong)
        job.telemetry.append(_reading(machine))
        for direction in request.measuring.passes:
            _measure_pass(job, machine, backend, direction, timed[direction], held_before)
            job.telemetry.append(_reading(machine))
    job.flags |= telemetry_flags(tuple(job.telemetry))


def _with_gradients(request: Request) -> bool:
    return "backward" in request.measuring.passes


def _first_calls(
    job: _Job, calls: Calls, device: str, prepared_s: float
) -> tuple[dict[str, Call], dict[str, torch.Tensor], dict[str, float]]:
    """Run each pass for the first time: the calls to time, the tensors to judge, and what the first calls cost."""
    timed: dict[str, Call] = {"forward": calls.forward}
    seconds: dict[str, float] = {}
    with job.stage("first_call"):
        began = time.perf_counter()
        out = calls.forward()
        synchronize(device)
        seconds["forward"] = prepared_s + time.perf_counter() - began
        tensors = {"out": out.detach()}
        if _with_gradients(job.request):
            began = time.perf_counter()
            timed["backward"] = calls.backward(out)
            gradients = timed["backward"]()
            synchronize(device)
            seconds["backward"] = time.perf_counter() - began
            tensors |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return timed, tensors, seconds


def _errors(
    request: Request, tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, dict[str, TensorError]]:
    """The errors by pass: the output's under `forward`, the gradients' under `backward`."""
    tolerance = request.measuring.tolerance
    errors: dict[str, dict[str, TensorError]] = {"forward": {}, "backward": {}}
    for name, tensor in tensors.items():
        kind, direction = ("out", "forward") if name == "out" else ("gradient", "backward")
        errors[direction][name] = tensor_error(tensor, expected[name], tolerance[kind])
    return errors


def _measure_pass(job: _Job, machine: Machine, backend: Backend, direction: str, call: Call, held_before: int) -> None:
    """Name the kernels of one pass, then time it; fills the pass's record, metrics and flags."""
    request, case, measuring = job.request, job.request.case, job.request.measuring
    so_far = job.passes[direction]
    with job.stage("kernels"):
        kernels, peak_bytes, lossy = _kernels(machine, call, held_before)
    so_far = replace(so_far, peak_memory_bytes=peak_bytes, kernels=kernels[:_KERNELS_KEPT])
    job.passes[direction] = so_far
    if lossy:
        job.flags.add("profiler_lossy")
    else:
        _check_claim(backend, direction, machine.device, kernels)
    rule = StoppingRule(measuring.precision, measuring.min_rounds, measuring.max_rounds, measuring.budget_s)
    timer = make_timer(measuring.timer, machine.gpu)
    others: list[Timing] = []

    def amid() -> None:
        with job.stage("second_opinions"):
            others.extend(_second_opinions(job, machine, timer, call))

    with job.stage("timing"):
        ranking = sample(timer, call, rule, kernels=sum(kernel.count for kernel in kernels) + 1, amid=amid)
    job.passes[direction] = replace(so_far, timings=(ranking, *others))
    job.flags |= timing_flags(ranking, tuple(others))
    peak = datasheet_peak(machine.environment.get("gpu", ""))
    impossible = implausibility(case, direction, ranking, peak)
    if impossible:
        raise Stopped("implausible", impossible)
    job.metrics |= pass_metrics(
        case,
        direction,
        job.passes[direction],
        saves_lse=_with_gradients(request),
        ceilings=job.ceilings,
        peak=peak,
    )


def _kernels(machine: Machine, call: Call, held_before: int) -> tuple[tuple[Kernel, ...], int | None, bool]:
    """What runs in a call, on a GPU the memory that it needs at its peak in bytes, and whether the profiler failed."""
    if machine.gpu is None:
        return operators(call), None, False
    torch.cuda.reset_peak_memory_stats()
    traced = trace(machine.gpu, call, _TRACED_CALLS)
    return traced.kernels(), torch.cuda.max_memory_allocated() - held_before, traced.lossy


def _check_claim(backend: Backend, direction: str, device: str, kernels: tuple[Kernel, ...]) -> None:
    claim = backend.claimed_kernels(direction, device)
    if claim and not any(re.search(claim, kernel.name) for kernel in kernels):
        ran = ", ".join(kernel.name.split("(")[0] for kernel in kernels[:3]) or "no kernel at all"
        raise Stopped("wrong_kernel", f"{direction}: {backend.name} claims /{claim}/, but what ran is {ran}")


def _second_opinions(job: _Job, machine: Machine, timer: Timer, call: Call) -> list[Timing]:
    """A block each by the other timers, amid the rounds of the one that ranks: seconds later clocks would differ."""
    began = time.perf_counter()
    call()
    synchronize(machine.device)
    call_us = (time.perf_counter() - began) * 1e6
    fewest, most = _SECOND_OPINION_CALLS
    calls = max(fewest, min(most, int(_SECOND_OPINION_US / call_us)))
    found = []
    for name in job.request.measuring.also:
        if name == "event" and not getattr(timer, "blocked", True):
            continue  # where the device timer runs unblocked, it does what `event` does
        try:
            found.append(single_block(make_timer(name, machine.gpu), call, calls))
        except ProfilerLost:
            job.flags.add("profiler_lossy")
    return found


def _reading(machine: Machine) -> dict[str, Any]:
    return machine.state.read() if machine.state else {}


def _held_bytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
