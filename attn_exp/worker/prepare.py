"""Turn a request into calls that may be timed: checked against the reference, with named and checked kernels."""

import contextlib
import gc
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attn_exp.attention.inputs import Accumulator, DifferentiableInputs
from attn_exp.backends.base import Backend, Calls, load_backend, step
from attn_exp.backends.compile import compile_calls, compile_record, reset_counters, use_caches, without_recompiling
from attn_exp.core.case.case import HALVES
from attn_exp.core.record.record import PassRecord
from attn_exp.core.record.request import Request
from attn_exp.timers.call import Call, synchronize
from attn_exp.worker.attempt import Attempt, Stopped
from attn_exp.worker.capabilities import refusal
from attn_exp.worker.check.check import Check
from attn_exp.worker.check.form import Results
from attn_exp.worker.check.serving import check_shorter
from attn_exp.worker.loaded import check_source
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.memory import Ledger, OwnMemory
from attn_exp.workloads import workload_of
from attn_exp.workloads.base import Workload


@dataclass(frozen=True)
class PreparedBackend:
    """A backend that is ready to be timed, with a call for each pass; `begin` makes it one that a timer may make.

    `memory` is None on a CPU, and `build_mask` without data of a mask to build anew.
    """

    backend: Backend
    calls: dict[str, Call]
    scope: Callable[[], AbstractContextManager[Any]]
    memory: OwnMemory | None
    check: Check
    build_mask: Callable[[], object] | None

    def begin(self, direction: str) -> Call:
        """Return the call of a pass; the backward is that of a new forward. Call it inside `scope()`."""
        if direction == "backward":
            # Frees what an earlier one saved before the new one takes as much.
            self.calls.pop(direction, None)
            if self.memory is not None:
                self.memory.look_at_forward(self.calls["forward"])
            self.calls[direction] = self._backward()
        return self.calls[direction]

    def _backward(self) -> Call:
        return self.check.calls.backward(self.check.calls.forward())

    def calls_of(self, passes: Collection[str]) -> dict[str, Call]:
        """Return a call of each pass for a profiler; the backward is of a new forward if none is kept."""
        if "backward" in passes and "backward" not in self.calls:
            with self.scope():
                self.calls["backward"] = self._backward()
        return {direction: self.calls[direction] for direction in passes}


def prepare(attempt: Attempt, machine: Machine) -> PreparedBackend:
    """Prepare a job up to its first calls, and check their results.

    Raises Stopped if the case is unsupported, or a result inaccurate.
    """
    request, case, device = attempt.request, attempt.request.case, machine.device
    # Collect cyclic garbage first; freeing it during the job would corrupt the memory delta. The young generations hold
    # what jobs make. A full collection would scan all imported modules for 14 ms.
    gc.collect(1)
    ledger = Ledger(machine.memory)
    began = time.perf_counter()
    backend, workload = attempt.given or (load_backend(request.backend), workload_of(case))
    loaded_s = time.perf_counter() - began
    check_source(request)
    began = time.perf_counter()
    with attempt.stage("unsupported"):
        reason = refusal(backend, request, device)
    asked_s = time.perf_counter() - began
    if reason is not None:
        raise Stopped("unsupported", reason)
    attempt.others = None if machine.memory is None else machine.memory.of_others()
    machine.watch.start()
    with attempt.stage("ceilings"), ledger.others():
        sustained = request.measuring.regime == "sustained"
        attempt.ceilings = machine.ceilings_for(case.dtype, sustained=sustained)
    with attempt.stage("inputs"):
        with ledger.others():
            machine.forget_other_case(request, with_gradients=attempt.with_gradients)
        shares = machine.shared is not None
        with ledger.others() if shares else contextlib.nullcontext():
            inputs = machine.inputs_for(request, workload, with_gradients=attempt.with_gradients)
        if shares:
            ledger.count((*inputs.leaves, inputs.d_out))
        synchronize(device)
    machine.announce("check")
    with attempt.stage("accuracy"), ledger.others():
        # Before the backend runs: a backend that overwrites its inputs must not change the reference.
        machine.expected_for(request, inputs, workload, with_gradients=attempt.with_gradients)
        synchronize(device)
    machine.announce("compile")
    with attempt.stage("first_call"):
        reset_counters()
        use_caches(request)
        began = time.perf_counter()
        calls = calls_for(request, workload, backend, inputs)
        # Whatever is built before it is asked to prepare is a part of the first call's cost.
        prepared_s = loaded_s + asked_s + time.perf_counter() - began
    if case.page_size is not None and getattr(calls.inputs, "paging", None) is None:
        # It declares nothing, and would be measured on what was gathered for it.
        raise Stopped("unsupported", f"{backend.name} reads no pages: set cache=contiguous, or see attn-exp backends")
    with ledger.others():
        check = Check(attempt, machine, workload, calls, inputs)
    with calls.scope():
        runs, results, first_s = _first_calls(attempt, calls, check, device, prepared_s)
        machine.announce("check")
        with attempt.stage("accuracy"), machine.settings.again(), ledger.others():
            errors, wrong = check.first(results)
        del results
        attempt.compiled, attempt.notes = compile_record(), calls.notes
    work = workload.work(case)
    for direction in request.measuring.passes:
        halves = HALVES if direction == "step" else (direction,)
        attempt.passes[direction] = PassRecord(
            first_call_s=sum(first_s[half] for half in halves),
            # The forward makes `out`, the backward all others.
            errors={name: one for name, one in errors.items() if HALVES[name != "out"] in halves},
            work=work.get(direction),
            workspace_bytes=None if (size := attempt.notes.get(f"{direction}_workspace_bytes")) is None else int(size),
        )
    if wrong:
        raise Stopped("inaccurate", wrong)
    # With what the first forward saved: `begin` makes another backward.
    runs.pop("backward", None)
    with calls.scope(), ledger.others():
        check.hard()
        check_shorter(attempt, machine, backend, workload)
    memory = ledger.own(inputs.d_out)
    return PreparedBackend(
        backend=backend,
        calls=runs,
        scope=lambda: without_recompiling(calls.scope()),
        memory=memory,
        check=check,
        build_mask=calls.build_mask,
    )


def calls_for(request: Request, workload: Workload, backend: Backend, inputs: DifferentiableInputs) -> Calls:
    """Return the calls of a job, compiled and with gradients that accumulate if requested; nothing is called yet."""
    calls = workload.calls(backend, request.case, inputs)
    if request.compile.mode != "none":
        calls = compile_calls(calls, request.compile)
    if not request.measuring.accumulate:
        return calls
    backward, accumulator = calls.backward, Accumulator(calls.inputs or inputs)
    return replace(calls, backward=lambda out: accumulator.backward(backward(out)))


def _first_calls(
    attempt: Attempt, calls: Calls, check: Check, device: str, prepared_s: float
) -> tuple[dict[str, Call], Results, dict[str, float]]:
    """Call each pass once; return the calls, their results, and their seconds, the forward's with what came before."""
    runs: dict[str, Call] = {"forward": calls.forward}
    seconds: dict[str, float] = {}
    with attempt.stage("first_call"):
        began = time.perf_counter()
        out = calls.forward()
        synchronize(device)
        seconds["forward"] = prepared_s + time.perf_counter() - began
        results = check.form.results("forward", out)
        if attempt.with_gradients:
            began = time.perf_counter()
            runs["backward"] = calls.backward(out)
            gradients = runs["backward"]()
            synchronize(device)
            seconds["backward"] = time.perf_counter() - began
            results |= check.form.results("backward", gradients)
        if "step" in attempt.request.measuring.passes:
            runs["step"] = partial(step, calls)
    return runs, results, seconds
