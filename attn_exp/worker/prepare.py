"""Turn a request into calls that may be timed: checked against the reference, with named and checked kernels."""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.inputs import DifferentiableInputs, Inputs
from attn_exp.attention.mask_edges import edge_error
from attn_exp.attention.tolerance import Expected
from attn_exp.backends.base import Backend, Calls, load_backend, supported_passes
from attn_exp.backends.compile import compile_calls, compile_record, reset_counters, use_caches, without_recompiling
from attn_exp.core.record import PassRecord, Request, TensorError
from attn_exp.timers.sync import synchronize
from attn_exp.timers.timed_call import Call
from attn_exp.worker.attempt import Attempt, Stopped
from attn_exp.worker.device import Machine
from attn_exp.worker.loaded import check_source
from attn_exp.workloads import workload_of
from attn_exp.workloads.base import Workload


@dataclass(frozen=True)
class PreparedBackend:
    """A backend that is ready to be timed.

    Attributes:
        backend: the backend.
        calls: a call for each pass.
        scope: makes the context manager that the calls run in.
        own_bytes: the GPU memory that it holds, in bytes.
        wrong: calls each pass once more and returns why its results are wrong, or None.
    """

    backend: Backend
    calls: dict[str, Call]
    scope: Callable[[], AbstractContextManager[Any]]
    own_bytes: int
    wrong: Callable[[], str | None] = lambda: None


def prepare(attempt: Attempt, machine: Machine) -> PreparedBackend:
    """Prepare a job up to its first calls, and check their results.

    Dynamo keeps what it compiled for earlier rivals: the rivals of a duel are prepared one after the other (see
    `reset_dynamo`).

    Raises:
        Stopped: the case is unsupported, or a result inaccurate.
    """
    request, case, device = attempt.request, attempt.request.case, machine.device
    backend, workload = load_backend(request.backend), workload_of(case)
    check_source(request)
    with attempt.stage("unsupported"):
        reason = backend.unsupported(case, device)
    if reason is None and attempt.with_gradients and "backward" not in supported_passes(backend, case):
        reason = f"{backend.name} has no backward{f' of {case.dtype}' * case.quantised}: set passes=[forward]"
    if reason is not None:
        raise Stopped("unsupported", reason)
    with attempt.stage("ceilings"):
        attempt.ceilings = machine.ceilings_for(case.dtype, load=request.measuring.regime == "sustained")
    with attempt.stage("inputs"):
        machine.forget_other_case(request, with_gradients=attempt.with_gradients)
        # Collect cyclic garbage first; freeing it during the job would corrupt the memory delta. The young generations
        # hold what jobs make. A full collection would scan all imported modules for 14 ms.
        gc.collect(1)
        held_before = machine.held_bytes()
        inputs = workload.make_inputs(case, device, request.measuring.seed, with_gradients=attempt.with_gradients)
        synchronize(device)
    with attempt.stage("accuracy"):
        # Before the backend runs: a backend that overwrites its inputs must not change the reference.
        before = machine.held_bytes()
        expected = machine.expected_for(request, inputs, with_gradients=attempt.with_gradients)
        synchronize(device)
        held_before += machine.held_bytes() - before
    with attempt.stage("first_call"):
        reset_counters()
        use_caches(request.caches)
        began = time.perf_counter()
        calls = calls_for(request, workload, backend, inputs)
        prepared_s = time.perf_counter() - began
    with calls.scope():
        timed, tensors, first_s = _first_calls(attempt, calls, inputs.gradient_names, device, prepared_s)
        with attempt.stage("accuracy"):
            errors, wrong = _check_results(request, inputs, expected, tensors, calls.scales)
        del tensors
        attempt.compiled, attempt.notes = compile_record(), calls.notes
        own_bytes = machine.held_bytes() - held_before
    work = workload.work(case)
    for direction in request.measuring.passes:
        attempt.passes[direction] = PassRecord(
            first_call_s=first_s[direction], errors=errors[direction], work=work.get(direction)
        )
    if wrong:
        raise Stopped("inaccurate", wrong)

    def wrong_now() -> str | None:
        wanted = machine.expected_for(request, inputs, with_gradients=attempt.with_gradients)
        later = {"out": timed["forward"]().detach()}
        if attempt.with_gradients:
            later |= dict(zip(inputs.gradient_names, timed["backward"](), strict=True))
        return _check_results(request, inputs, wanted, later, calls.scales)[1]

    return PreparedBackend(backend, timed, lambda: without_recompiling(calls.scope()), own_bytes, wrong_now)


def calls_for(request: Request, workload: Workload, backend: Backend, inputs: DifferentiableInputs) -> Calls:
    """Return the calls of a job, compiled if requested; nothing is called yet."""
    calls = workload.calls(backend, request.case, inputs)
    return calls if request.compile.mode == "none" else compile_calls(calls, request.compile)


def _first_calls(
    attempt: Attempt, calls: Calls, gradient_names: Sequence[str], device: str, prepared_s: float
) -> tuple[dict[str, Call], dict[str, torch.Tensor], dict[str, float]]:
    """Call each pass for the first time.

    Return the calls to time, the tensors to check, and the first calls' seconds.
    """
    timed: dict[str, Call] = {"forward": calls.forward}
    seconds: dict[str, float] = {}
    with attempt.stage("first_call"):
        began = time.perf_counter()
        out = calls.forward()
        synchronize(device)
        seconds["forward"] = prepared_s + time.perf_counter() - began
        tensors = {"out": out.detach()}
        if attempt.with_gradients:
            began = time.perf_counter()
            timed["backward"] = calls.backward(out)
            gradients = timed["backward"]()
            synchronize(device)
            seconds["backward"] = time.perf_counter() - began
            tensors |= dict(zip(gradient_names, gradients, strict=True))
    return timed, tensors, seconds


def _check_results(
    request: Request,
    inputs: DifferentiableInputs,
    expected: Expected,
    tensors: dict[str, torch.Tensor],
    scales: dict[str, float],
) -> tuple[dict[str, dict[str, TensorError]], str | None]:
    """Return the errors by pass and tensor, and what is wrong or None.

    The output's error is under `forward`, the gradients' under `backward`.
    """
    errors: dict[str, dict[str, TensorError]] = {"forward": {}, "backward": {}}
    for name, tensor in tensors.items():
        errors["forward" if name == "out" else "backward"][name] = expected.judge(name, tensor, scales.get(name, 1.0))
    wrong = inaccuracy({name: error for pass_errors in errors.values() for name, error in pass_errors.items()})
    if wrong is None and isinstance(inputs, Inputs):
        wrong = edge_error(request.case, inputs, tensors["out"])
    return errors, wrong
