"""Prepare: from a request to calls that may be timed: judged against the reference, their kernels named and checked."""

import gc
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_exp.accuracy import inaccuracy
from attn_exp.attempt import Attempt, Stopped
from attn_exp.backends.base import Backend, Calls, load_backend, supported_passes
from attn_exp.ceilings import synchronize
from attn_exp.compilation import compile_calls, forget, found, use_caches, without_recompiling
from attn_exp.inputs import make_inputs
from attn_exp.machine import Machine
from attn_exp.record import Kernel, PassRecord, TensorError
from attn_exp.timers.kernel import operators, trace
from attn_exp.timers.loop import Call
from attn_exp.tolerance import Expected

_TRACED_CALLS = 2
_KERNELS_KEPT = 24


@dataclass(frozen=True)
class Rival:
    """A backend ready to be timed: its calls by pass, the scope they run in, and the GPU memory it holds in bytes."""

    backend: Backend
    calls: dict[str, Call]
    scope: Callable[[], AbstractContextManager[Any]]
    own_bytes: int


def prepare(attempt: Attempt, machine: Machine) -> Rival:
    """Everything up to the first calls and their judgement, in this order.

    Raises:
        Stopped: the case is unsupported, or the result inaccurate.
    """
    request, case, device = attempt.request, attempt.request.case, machine.device
    if machine.gpu is not None:
        machine.gpu.l2 = request.measuring.l2
    backend = load_backend(request.backend)
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
        # What an earlier job left in cycles would be freed during this one, and its memory come out negative.
        # The young generations hold what jobs make; a full collection would look at all that is imported, for 14 ms.
        gc.collect(1)
        held_before = machine.held_bytes()
        inputs = make_inputs(case, device, request.measuring.seed, with_gradients=attempt.with_gradients)
        synchronize(device)
    with attempt.stage("accuracy"):
        # Before the backend runs: one that writes into its inputs must not spoil what it is judged by.
        before = machine.held_bytes()
        expected = machine.expected_for(request, inputs, with_gradients=attempt.with_gradients)
        synchronize(device)
        held_before += machine.held_bytes() - before
    with attempt.stage("first_call"):
        forget()
        use_caches(request.caches)
        began = time.perf_counter()
        calls = backend.prepare(case, inputs)
        if request.compile.mode != "none":
            calls = compile_calls(calls, request.compile)
        prepared_s = time.perf_counter() - began
    with calls.scope():
        timed, tensors, first_s = _first_calls(attempt, calls, device, prepared_s)
        with attempt.stage("accuracy"):
            errors = _errors(tensors, expected, calls.scales)
        del tensors
        attempt.compiled, attempt.notes = found(), calls.notes
        own_bytes = machine.held_bytes() - held_before
    for direction in request.measuring.passes:
        attempt.passes[direction] = PassRecord(first_call_s=first_s[direction], errors=errors[direction])
    wrong = inaccuracy({name: error for found in errors.values() for name, error in found.items()})
    if wrong:
        raise Stopped("inaccurate", wrong)
    return Rival(backend, timed, lambda: without_recompiling(calls.scope()), own_bytes)


def name_kernels(attempt: Attempt, machine: Machine, rival: Rival, direction: str) -> float:
    """Name what runs in one pass and check it against the backend's claim; how many kernels a call launches.

    To be called inside of the rival's scope.

    Raises:
        Stopped: other kernels ran than the backend claims.
    """
    call = rival.calls[direction]
    with attempt.stage("kernels"):
        kernels, peak_bytes, lossy = _kernels(machine, call, rival.own_bytes)
    attempt.passes[direction] = replace(
        attempt.passes[direction], peak_memory_bytes=peak_bytes, kernels=kernels[:_KERNELS_KEPT]
    )
    if took := getattr(rival.backend, "took", None):
        named = took(direction, machine.device, kernels)
        attempt.passes[direction] = replace(attempt.passes[direction], took=named)
    if lossy:
        attempt.flags.add("profiler_lossy")
    elif attempt.request.compile.mode == "none" or not getattr(rival.backend, "transparent", False):
        _check_claim(rival.backend, direction, machine.device, kernels)
    return sum(kernel.count for kernel in kernels)


def _first_calls(
    attempt: Attempt, calls: Calls, device: str, prepared_s: float
) -> tuple[dict[str, Call], dict[str, torch.Tensor], dict[str, float]]:
    """Run each pass for the first time: the calls to time, the tensors to judge, and what the first calls cost."""
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
            tensors |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return timed, tensors, seconds


def _errors(
    tensors: dict[str, torch.Tensor], expected: Expected, scales: dict[str, float]
) -> dict[str, dict[str, TensorError]]:
    """The errors by pass: the output's under `forward`, the gradients' under `backward`."""
    errors: dict[str, dict[str, TensorError]] = {"forward": {}, "backward": {}}
    for name, tensor in tensors.items():
        errors["forward" if name == "out" else "backward"][name] = expected.judge(name, tensor, scales.get(name, 1.0))
    return errors


def _kernels(machine: Machine, call: Call, own_bytes: int) -> tuple[tuple[Kernel, ...], int | None, bool]:
    """What runs in a call, on a GPU the memory that it needs at its peak in bytes, and whether the profiler failed."""
    if machine.gpu is None:
        return operators(call), None, False
    others_bytes = machine.held_bytes() - own_bytes
    torch.cuda.reset_peak_memory_stats()
    traced = trace(machine.gpu, call, _TRACED_CALLS)
    return traced.kernels(), torch.cuda.max_memory_allocated() - others_bytes, traced.lossy


def _check_claim(backend: Backend, direction: str, device: str, kernels: tuple[Kernel, ...]) -> None:
    claim = backend.claimed_kernels(direction, device)
    if claim and not any(re.search(claim, kernel.name) for kernel in kernels):
        ran = ", ".join(kernel.name.split("(")[0] for kernel in kernels[:3]) or "no kernel at all"
        raise Stopped("wrong_kernel", f"{direction}: {backend.name} claims /{claim}/, but what ran is {ran}")
