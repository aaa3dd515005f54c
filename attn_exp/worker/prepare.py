"""Turn a request into calls that may be timed: checked against the reference, with named and checked kernels."""

import gc
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from attn_exp.attention.inputs import DifferentiableInputs
from attn_exp.backends.base import Backend, Calls, load_backend, step, supported_passes
from attn_exp.backends.compile import compile_calls, compile_record, reset_counters, use_caches, without_recompiling
from attn_exp.core.case import HALVES
from attn_exp.core.record import PassRecord
from attn_exp.core.request import Request
from attn_exp.timers.sync import synchronize
from attn_exp.timers.timed_call import Call, TimedCall
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.judgements import Judgements
from attn_exp.worker.judge.timed_pass import Results
from attn_exp.worker.loaded import check_source
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.guard import Guard
from attn_exp.worker.machine.memory import Ledger, OwnMemory
from attn_exp.worker.stopped import Stopped
from attn_exp.workloads import workload_of
from attn_exp.workloads.base import Workload


@dataclass(frozen=True)
class PreparedBackend:
    """A backend that is ready to be timed.

    Attributes:
        backend: the backend.
        calls: a call for each pass; `begin` makes it one that a timer may make.
        scope: makes the context manager that the calls run in.
        memory: what it holds and takes, None on a CPU.
        judge: renews the inputs and keeps results.
        judgements: compares them.
        build_mask: builds the mask's data anew, None if there is none.
    """

    backend: Backend
    calls: dict[str, Call]
    scope: Callable[[], AbstractContextManager[Any]]
    memory: OwnMemory | None
    judge: Judge
    judgements: Judgements
    build_mask: Callable[[], object] | None

    def begin(self, direction: str) -> TimedCall:
        """Return the call of a pass, with new inputs before each time that a timer makes it.

        The backward is that of the last timed forward. Call it inside `scope()`.
        """
        if direction == "backward":
            # Frees what an earlier one saved before the new one takes as much.
            self.calls.pop(direction, None)
            if self.memory is not None:
                self.memory.look_at_forward(self.calls["forward"])
            self.calls[direction] = self.judge.backward()
        timed = self.judge.timed(direction, self.calls[direction])
        self.calls[direction] = timed
        return timed

    def calls_of(self, passes: Collection[str]) -> dict[str, Call]:
        """Return a call of each pass for a profiler; the backward is of a new forward if none is kept."""
        if "backward" in passes and "backward" not in self.calls:
            with self.scope():
                self.calls["backward"] = self.judge.backward()
        return {direction: self.calls[direction] for direction in passes}


def prepare(attempt: Attempt, machine: Machine) -> PreparedBackend:
    """Prepare a job up to its first calls, and check their results.

    Dynamo keeps what it compiled for earlier rivals: the rivals of a duel are prepared one after the other (see
    `reset_dynamo`).

    Raises:
        Stopped: the case is unsupported, or a result inaccurate.
    """
    request, case, device = attempt.request, attempt.request.case, machine.device
    attempt.guard = guard = machine.guard or Guard.snapshot()
    # Collect cyclic garbage first; freeing it during the job would corrupt the memory delta. The young generations hold
    # what jobs make. A full collection would scan all imported modules for 14 ms.
    gc.collect(1)
    ledger = Ledger(machine.memory)
    began = time.perf_counter()
    backend, workload = attempt.given or (load_backend(request.backend), workload_of(case))
    loaded_s = time.perf_counter() - began
    check_source(request)
    guard.check("while the backend was loaded")
    began = time.perf_counter()
    with attempt.stage("unsupported"):
        reason = backend.unsupported(case, device)
    asked_s = time.perf_counter() - began
    if reason is None and attempt.with_gradients and "backward" not in supported_passes(backend, case):
        reason = f"{backend.name} has no backward{f' of {case.dtype}' * case.quantised}: set passes=[forward]"
    if case.in_codes and "step" in request.measuring.passes:
        reason = f"a step of {case.dtype} needs the scales of a step before it: set passes=[forward,backward]"
    if reason is not None:
        raise Stopped("unsupported", reason)
    machine.watch.start()
    with attempt.stage("ceilings"), ledger.others():
        settle_s = request.measuring.settle_s if request.measuring.regime == "sustained" else 0.0
        attempt.ceilings = machine.ceilings_for(case.dtype, settle_s=settle_s)
    with attempt.stage("inputs"):
        with ledger.others():
            machine.forget_other_case(request, with_gradients=attempt.with_gradients)
        measuring = request.measuring
        inputs = workload.make_inputs(
            case, device, measuring.seed, with_gradients=attempt.with_gradients, kind=measuring.inputs
        )
        synchronize(device)
    with attempt.stage("accuracy"), ledger.others():
        # Before the backend runs: a backend that overwrites its inputs must not change the reference.
        machine.expected_for(request, inputs, workload, with_gradients=attempt.with_gradients)
        synchronize(device)
    with attempt.stage("first_call"):
        reset_counters()
        use_caches(request)
        began = time.perf_counter()
        calls = calls_for(request, workload, backend, inputs)
        # Whatever is built before it is asked to prepare is a part of the first call's cost.
        prepared_s = loaded_s + asked_s + time.perf_counter() - began
    with ledger.others():
        judge = Judge(case, calls, inputs)
        judgements = Judgements(attempt, machine, workload, calls, judge)
    with calls.scope():
        runs, results, first_s = _first_calls(attempt, calls, judge, device, prepared_s)
        guard.check("while the backend was prepared and called for the first time")
        with attempt.stage("accuracy"), machine.settings.again(), ledger.others():
            seeded = judgements.seeded()
            errors, wrong = judgements.first(inputs, seeded, results)
        del results
        attempt.compiled, attempt.notes = compile_record(), calls.notes
    work = workload.work(case)
    for direction in request.measuring.passes:
        halves = HALVES if direction == "step" else (direction,)
        attempt.passes[direction] = PassRecord(
            first_call_s=sum(first_s[half] for half in halves),
            errors={name: error for half in halves for name, error in errors[half].items()},
            work=work.get(direction),
            workspace_bytes=_workspace_bytes(attempt.notes, direction),
        )
    if wrong:
        raise Stopped("inaccurate", wrong)
    # With what the first forward saved: `begin` makes another backward. Now, so that the next forward may get the same
    # addresses: what a backward keeps by these is stale then.
    runs.pop("backward", None)
    with calls.scope(), ledger.others():
        judgements.hard(seeded)
        del seeded
    memory = ledger.own(inputs.d_out)
    return PreparedBackend(
        backend=backend,
        calls=runs,
        scope=lambda: without_recompiling(calls.scope()),
        memory=memory,
        judge=judge,
        judgements=judgements,
        build_mask=calls.build_mask,
    )


def _workspace_bytes(notes: Mapping[str, float], direction: str) -> int | None:
    size = notes.get(f"{direction}_workspace_bytes")
    return None if size is None else int(size)


def calls_for(request: Request, workload: Workload, backend: Backend, inputs: DifferentiableInputs) -> Calls:
    """Return the calls of a job, compiled if requested; nothing is called yet."""
    calls = workload.calls(backend, request.case, inputs)
    return calls if request.compile.mode == "none" else compile_calls(calls, request.compile)


def _first_calls(
    attempt: Attempt, calls: Calls, judge: Judge, device: str, prepared_s: float
) -> tuple[dict[str, Call], Results, dict[str, float]]:
    """Call each pass for the first time.

    Return the calls of each pass, their results, and the first calls' seconds; the forward's with what came before.

    Raises:
        Stopped: a result is not what a call of its pass returns.
    """
    runs: dict[str, Call] = {"forward": calls.forward}
    seconds: dict[str, float] = {}
    with attempt.stage("first_call"):
        began = time.perf_counter()
        out = calls.forward()
        synchronize(device)
        seconds["forward"] = prepared_s + time.perf_counter() - began
        results = judge.results("forward", out)
        if attempt.with_gradients:
            began = time.perf_counter()
            runs["backward"] = calls.backward(out)
            gradients = runs["backward"]()
            synchronize(device)
            seconds["backward"] = time.perf_counter() - began
            results |= judge.results("backward", gradients)
        if "step" in attempt.request.measuring.passes:
            runs["step"] = partial(step, calls)
    return runs, results, seconds
