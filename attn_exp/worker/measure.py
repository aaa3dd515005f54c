"""Measure one job, or several rivals interleaved, from request to record: choose timers, run the loop, store samples.

The loop is attn_exp/timers/loop.py; the clock is read in a timer's `block`.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from attn_exp.backends.base import Backend
from attn_exp.backends.compile import reset_dynamo
from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.core.record.flags import clock_of, clocks_differ, duty_flags, telemetry_flags, timing_flags, window_flags
from attn_exp.core.record.metrics import pass_metrics
from attn_exp.core.record.record import Record, Timing
from attn_exp.core.record.request import Measuring, Request
from attn_exp.core.record.timers import disagreements
from attn_exp.core.stats.paired import abba_order
from attn_exp.timers.call import seconds
from attn_exp.timers.graph import CaptureFailed
from attn_exp.timers.loop import Cost, Entry, RivalFailed, sample_entry, sample_rivals
from attn_exp.timers.stopping import LONG_CALL_ROUNDS, StoppingRule
from attn_exp.worker.attempt import Attempt, Stopped, marked, status_of
from attn_exp.worker.determinism import measure_determinism
from attn_exp.worker.kernels import name_kernels
from attn_exp.worker.limits import check_limits
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.memory import call_memory
from attn_exp.worker.machine.settings import OwnState
from attn_exp.worker.pacing import is_heavy, pacing
from attn_exp.worker.prepare import PreparedBackend, prepare
from attn_exp.worker.secondary import secondary_timings, timer_for
from attn_exp.workloads.base import Workload

# The flush.
_KERNELS_AROUND = 1


def measure(request: Request, machine: Machine, given: tuple[Backend, Workload] | None = None) -> Record:
    """Measure one job and return its record; `given` replaces the backend and the workload that the request names."""
    return measure_and_keep(request, machine, given)[0]


def measure_and_keep(
    request: Request, machine: Machine, given: tuple[Backend, Workload] | None = None
) -> tuple[Record, PreparedBackend | None]:
    """Measure one job; also return the prepared calls for the profilers, None if the status is not `ok`."""
    attempt, kept = Attempt(request, given=given), list[PreparedBackend]()
    with marked("job", request.job, request.device):
        attempt.run(lambda: _measure(attempt, machine, kept))
    return attempt.record(machine), kept[0] if attempt.status == "ok" else None


def measure_interleaved(
    requests: Sequence[Request], machine: Machine, given: Sequence[tuple[Backend, Workload] | None] = ()
) -> list[Record]:
    """Measure rivals of one case interleaved: in every round one block of each, in ABBA order.

    Samples of different records with the same round index belong together. A rival that cannot be measured ends with
    its status, and the others continue. `given` has functions and tensors of the user's own, as for `measure`.
    """
    reset_dynamo()
    attempts = [
        Attempt(request, given=functions, own=OwnState(machine.settings))
        for request, functions in zip(requests, given or [None] * len(requests), strict=True)
    ]
    rivals: list[tuple[Attempt, PreparedBackend]] = []
    for attempt in attempts:
        attempt.run(lambda attempt=attempt: rivals.append((attempt, prepare(attempt, machine))))  # type: ignore[misc]
    for direction in requests[0].measuring.passes:
        standing = [(attempt, prepared) for attempt, prepared in rivals if attempt.status == "ok"]
        with marked("pass", direction, machine.device):
            _time_interleaved(standing, machine, direction)
    for attempt, prepared in rivals:
        if attempt.status == "ok":
            attempt.run(partial(_check_again, attempt, machine, prepared))
    measured = [attempt for attempt in attempts if attempt.status == "ok"]
    for direction in requests[0].measuring.passes:
        if clocks_differ([clock_of(one.passes[direction].window, one.telemetry) for one in measured]):
            for attempt in measured:
                attempt.flags.add("clock_mismatch")
    return [attempt.record(machine) for attempt in attempts]


def _measure(attempt: Attempt, machine: Machine, kept: list[PreparedBackend]) -> None:
    reset_dynamo()
    prepared = prepare(attempt, machine)
    kept.append(prepared)
    with prepared.scope():
        attempt.telemetry += machine.reading()
        for direction in attempt.request.measuring.passes:
            with marked("pass", direction, machine.device):
                _time_one(attempt, machine, _entry(attempt, machine, prepared, direction), direction)
            attempt.telemetry += machine.reading()
    _check_again(attempt, machine, prepared)
    _flag_telemetry(attempt, machine)


def _entry(attempt: Attempt, machine: Machine, prepared: PreparedBackend, direction: str) -> Entry:
    """Return a pass as the sampling loop takes it, with its kernels named; call it inside `prepared.scope()`."""
    measuring = attempt.request.measuring
    call = prepared.begin(direction)
    launched = name_kernels(attempt, machine, prepared, direction) + _KERNELS_AROUND
    check = prepared.check.timed(direction, min(measuring.min_rounds, LONG_CALL_ROUNDS))
    return Entry(
        timer_for(attempt.request, measuring.timer, machine),
        call,
        kernels=launched,
        before_block=check.before_block,
        after_block=check.after_block,
    )


def _check_again(attempt: Attempt, machine: Machine, prepared: PreparedBackend) -> None:
    """Check the timed blocks, measure what the mask takes to build, and if requested compare bits of more results."""
    machine.announce("check")
    gc.collect(1)
    prepared.check.after()
    if prepared.build_mask is not None:
        measure_mask(attempt, machine, prepared.build_mask)
        _store_metrics(attempt, machine, attempt.request.measuring.passes[0])
    if attempt.request.measuring.determinism:
        measure_determinism(attempt, machine, prepared)
        for direction in attempt.request.measuring.passes:
            _store_metrics(attempt, machine, direction)


def _time_one(attempt: Attempt, machine: Machine, entry: Entry, direction: str) -> None:
    others: list[Timing] = []

    def run_secondary() -> None:
        with attempt.stage("second_opinions"):
            others.extend(secondary_timings(attempt, machine, direction, entry.timer, entry.call))

    machine.announce("time")
    with attempt.stage("timing"):
        machine.watch.begin()
        try:
            ranking = sample_entry(
                entry,
                _rule(attempt.request.measuring),
                pace=pacing([attempt], machine, direction),
                second_opinions=run_secondary,
                done=lambda position: machine.watch.look(),
            )
        except CaptureFailed as error:
            raise Stopped("unsupported", f"{direction}: no CUDA graph can hold this call: {error}") from error
        finally:
            machine.watch.end()
    _store_timings(attempt, machine, direction, (ranking, *others))


def _time_interleaved(rivals: Sequence[tuple[Attempt, PreparedBackend]], machine: Machine, direction: str) -> None:
    entries: list[tuple[Attempt, Entry]] = []
    for attempt, prepared in rivals:

        def enter(attempt: Attempt = attempt, prepared: PreparedBackend = prepared) -> None:
            attempt.telemetry += machine.reading()
            with prepared.scope():
                entry = _entry(attempt, machine, prepared, direction)
            entries.append((attempt, replace(entry, scope=partial(_own_scope, attempt, prepared))))

        attempt.run(enter)
    timings = _sample_interleaved(entries, machine, direction)
    for (attempt, _), timing in zip(entries, timings, strict=True):
        attempt.run(lambda attempt=attempt, timing=timing: _store_timings(attempt, machine, direction, (timing,)))  # type: ignore[misc]
        _flag_telemetry(attempt, machine)


@contextlib.contextmanager
def _own_scope(attempt: Attempt, prepared: PreparedBackend) -> Iterator[None]:
    """Enter a rival's scope with what it has set for itself: no rival's settings make another one slower."""
    with attempt.own_state(), prepared.scope():
        yield


def _sample_interleaved(entries: list[tuple[Attempt, Entry]], machine: Machine, direction: str) -> list[Timing]:
    """Sample all entries; an entry that fails is removed with its status, and the others start over."""

    def read_clocks(position: int) -> None:
        machine.watch.look()
        entries[position][0].telemetry.extend(machine.reading())

    machine.announce("time")
    while entries:
        measuring = entries[0][0].request.measuring
        machine.watch.begin(alone=len(entries) == 1)
        try:
            return sample_rivals(
                [entry for _, entry in entries],
                _rule(measuring),
                order=abba_order,
                pace=pacing([attempt for attempt, _ in entries], machine, direction),
                done=read_clocks,
            )
        except RivalFailed as failed:
            attempt, _ = entries.pop(failed.position)
            attempt.run(partial(_raise, direction, failed.cause))
            if failed.round is not None:
                attempt.reason = f"{direction}, round {failed.round}: {attempt.reason}"
        finally:
            machine.watch.end()
    return []


def _raise(direction: str, cause: Exception) -> None:
    if isinstance(cause, CaptureFailed):
        raise Stopped("unsupported", f"{direction}: no CUDA graph can hold this call: {cause}") from cause
    raise cause


def _store_timings(attempt: Attempt, machine: Machine, direction: str, timings: tuple[Timing, ...]) -> None:
    """Store the samples of one pass, and derive flags and metrics."""
    measured, window = attempt.passes[direction], machine.watch.window(timings[0])
    apart = disagreements(timings, measured.kernels)
    flags = timing_flags(timings[0], timings[1:], machine.environment.get("event_quantum_us", 0.0))
    flags |= window_flags(window, machine.environment.get("max_sm_clock_mhz"))
    flags |= {"timers_disagree"} if apart else set()
    cost = Cost(statistics.median(timings[0].times_us), timings[0].notes.get("flush_us", 0.0))
    if machine.gpu is not None and is_heavy(attempt, direction, cost):
        machine.heavy_until = time.perf_counter()
        if attempt.request.measuring.regime == "sustained":
            flags |= duty_flags(timings[0])
    measured = replace(
        measured,
        timings=timings,
        disagreements=apart,
        flags=tuple(sorted(flags)),
        window=window,
        rest_s=machine.watch.rest_s,
    )
    attempt.passes[direction] = measured
    attempt.flags |= flags
    check_limits(attempt, machine, direction, datasheet_peak(machine.environment.get("gpu", "")))
    _store_metrics(attempt, machine, direction)


def _store_metrics(attempt: Attempt, machine: Machine, direction: str) -> None:
    attempt.metrics |= pass_metrics(
        attempt.request.case,
        direction,
        attempt.passes[direction],
        saves_lse=attempt.with_gradients,
        ceilings=attempt.ceilings,
        peak=datasheet_peak(machine.environment.get("gpu", "")),
        compiled=attempt.compiled,
    )


def _flag_telemetry(attempt: Attempt, machine: Machine) -> None:
    attempt.flags |= telemetry_flags(attempt.telemetry, machine.environment.get("max_sm_clock_mhz"))


def _rule(measuring: Measuring) -> StoppingRule:
    return StoppingRule(
        measuring.precision, measuring.min_rounds, measuring.max_rounds, measuring.budget_s, measuring.patience_s
    )


# Several times, since the first one loads kernels; building the largest takes seconds, and then two are enough.
_LEAST, _MOST, _BUDGET_S = 2, 8, 0.2


def measure_mask(attempt: Attempt, machine: Machine, build: Callable[[], object]) -> None:
    """Build the mask's data again and again, and keep the median time and the peak of the memory.

    A model whose mask changes from batch to batch pays this beside the attention. If the memory does not hold another
    mask beside the one that is timed, it is not known.
    """
    times: list[float] = []
    try:
        with attempt.stage("mask"):
            memory = None if machine.memory is None else call_memory(machine.memory, build).peak
            began = time.perf_counter()
            while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() - began < _BUDGET_S):
                times.append(seconds(machine.device, build))
    except Exception as error:  # whatever does not fit
        if status_of(error, "")[0] != "out_of_memory":
            raise
        return
    direction = attempt.request.measuring.passes[0]
    attempt.passes[direction] = replace(
        attempt.passes[direction], mask_build_us=statistics.median(times[1:]) * 1e6, mask_build_bytes=memory
    )
