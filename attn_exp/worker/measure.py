"""Measure one job, or several rivals interleaved, from request to record: choose timers, run the loop, store samples.

The loop is attn_exp/timers/loop.py; the clock is read in a timer's `block`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from attn_exp.backends.base import Backend
from attn_exp.backends.compile import reset_dynamo
from attn_exp.core.flags import clock_of, clocks_differ, telemetry_flags, timing_flags, window_flags
from attn_exp.core.hardware import datasheet_peak
from attn_exp.core.metrics import pass_metrics
from attn_exp.core.paired_test import abba_order
from attn_exp.core.record import Record, Timing
from attn_exp.core.request import Measuring, Request
from attn_exp.core.second_opinions import disagreements
from attn_exp.timers.graph import CaptureFailed
from attn_exp.timers.loop import Entry, RivalFailed, Timer, sample, sample_rivals
from attn_exp.timers.stopping import StoppingRule
from attn_exp.timers.timed_call import TimedCall, as_timed
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.determinism import measure_determinism
from attn_exp.worker.judge.first_backward import check_first_backward
from attn_exp.worker.judge.forwards import count_forwards, time_forwards
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.one_call import OneCall
from attn_exp.worker.judge.steps import check_steps
from attn_exp.worker.judge.threads import check_threads
from attn_exp.worker.kernels import name_kernels
from attn_exp.worker.limits import check_limits
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.own_state import OwnState
from attn_exp.worker.mask_building import measure_mask
from attn_exp.worker.nvtx import marked
from attn_exp.worker.prepare import PreparedBackend, prepare
from attn_exp.worker.secondary import secondary_timings, timer_for
from attn_exp.worker.settled import settling
from attn_exp.worker.stopped import Stopped
from attn_exp.workloads.base import Workload

# On an H200 the power cap takes effect after 15 to 30 ms of load; a tenth of a second of rest resets it.
BURST_REST_S = 0.1
# The flush, seven changes of the inputs and of their signs, and looks at results, which are few on average.
_KERNELS_AROUND = 9


def measure(request: Request, machine: Machine) -> Record:
    """Measure one job and return its record."""
    return measure_and_keep(request, machine)[0]


def measure_and_keep(request: Request, machine: Machine) -> tuple[Record, PreparedBackend | None]:
    """Measure one job; also return the prepared calls for the profilers, None if the status is not `ok`."""
    attempt, kept = Attempt(request), list[PreparedBackend]()
    _run(attempt, machine, kept)
    return attempt.record(machine), kept[0] if attempt.status == "ok" else None


def measure_given(request: Request, machine: Machine, backend: Backend, workload: Workload) -> Record:
    """Measure a function and tensors of the user's own in place of what the request names, and return the record."""
    attempt = Attempt(request, given=(backend, workload))
    _run(attempt, machine, [])
    return attempt.record(machine)


def measure_interleaved(
    requests: Sequence[Request], machine: Machine, given: Sequence[tuple[Backend, Workload] | None] = ()
) -> list[Record]:
    """Measure rivals of one case interleaved: in every round one block of each, in ABBA order.

    Samples of different records with the same round index belong together. A rival that cannot be measured ends with
    its status, and the others continue. `given` has functions and tensors of the user's own, as `measure_given` does.
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
    _flag_clocks(attempts)
    return [attempt.record(machine) for attempt in attempts]


def _run(attempt: Attempt, machine: Machine, kept: list[PreparedBackend]) -> None:
    with marked("job", attempt.request.job, attempt.request.device):
        attempt.run(lambda: _measure(attempt, machine, kept))


def _measure(attempt: Attempt, machine: Machine, kept: list[PreparedBackend]) -> None:
    reset_dynamo()
    prepared = prepare(attempt, machine)
    kept.append(prepared)
    with prepared.scope():
        attempt.telemetry += machine.reading()
        for direction in attempt.request.measuring.passes:
            with marked("pass", direction, machine.device):
                call = prepared.begin(direction)
                launched = name_kernels(attempt, machine, prepared, direction) + _KERNELS_AROUND
                _time_one(attempt, machine, prepared.judge, call, direction, launched)
            attempt.telemetry += machine.reading()
    _check_again(attempt, machine, prepared)
    _flag_telemetry(attempt, machine)


def _check_again(attempt: Attempt, machine: Machine, prepared: PreparedBackend) -> None:
    """Compare the results of timed calls with a reference of their inputs, and a timed backward with first ones.

    Measure what the mask takes to build; if requested, compare the bits of further results with each other.

    Raises:
        Stopped: a result is inaccurate, a clock was replaced, first backwards take longer than the one that was timed,
            or a backend is not deterministic as it promises.
    """
    if attempt.guard is not None:
        attempt.guard.check("while it was timed")
    with prepared.scope():
        prepared.judgements.timed()
        if machine.gpu is None:
            check_threads(attempt, prepared.judge, prepared.calls)
        if "backward" in prepared.judge.passes:
            told = check_first_backward(attempt, machine, prepared.judge, prepared.calls)
            prepared.judgements.later(told)
        if attempt.request.case.workload is not None:
            # With what the timed forward saved: the attention alone got the memory without it before.
            prepared.calls.pop("backward", None)
        prepared.judgements.again()
    if prepared.build_mask is not None:
        measure_mask(attempt, machine, prepared.build_mask)
        _store_metrics(attempt, machine, attempt.request.measuring.passes[0])
    if attempt.request.measuring.determinism:
        measure_determinism(attempt, machine, prepared)
        for direction in attempt.request.measuring.passes:
            _store_metrics(attempt, machine, direction)


def _time_one(
    attempt: Attempt, machine: Machine, judge: Judge, call: TimedCall, direction: str, launched: float
) -> None:
    measuring = attempt.request.measuring
    timer = timer_for(attempt.request, measuring.timer, machine)
    others: list[Timing] = []

    def run_secondary() -> None:
        with attempt.stage("second_opinions"):
            others.extend(secondary_timings(attempt, machine, direction, timer, call))

    with attempt.stage("timing"):
        machine.watch.begin()
        try:
            ranking = sample(
                timer,
                call,
                _rule(measuring),
                kernels=launched,
                rest_s=_rest_s(measuring),
                settle=settling([attempt], machine, direction),
                started=partial(judge.start, direction),
                midway=run_secondary,
                after_block=lambda position: machine.watch.look(),
            )
            machine.watch.end()
            _make_last(attempt, machine, judge, direction, timer, call)
        except CaptureFailed as error:
            raise Stopped("unsupported", f"{direction}: no CUDA graph can hold this call: {error}") from error
        finally:
            machine.watch.end()
    _store_timings(attempt, machine, direction, (ranking, *others))


def _time_interleaved(rivals: Sequence[tuple[Attempt, PreparedBackend]], machine: Machine, direction: str) -> None:
    entries: list[tuple[Attempt, Entry]] = []
    judges: dict[int, Judge] = {}
    for attempt, prepared in rivals:

        def enter(attempt: Attempt = attempt, prepared: PreparedBackend = prepared) -> None:
            attempt.telemetry += machine.reading()
            with prepared.scope():
                call = prepared.begin(direction)
                launched = name_kernels(attempt, machine, prepared, direction) + _KERNELS_AROUND
            measuring = attempt.request.measuring
            timer = timer_for(attempt.request, measuring.timer, machine)
            entries.append((attempt, Entry(timer, call, partial(_own_scope, attempt, prepared), launched)))
            judges[id(attempt)] = prepared.judge

        attempt.run(enter)

    def started() -> None:
        for judge in judges.values():
            judge.start(direction)

    timings = _sample_interleaved(entries, machine, direction, started)
    for (attempt, entry), timing in zip(entries, timings, strict=True):
        attempt.run(partial(_make_last_of_rival, attempt, machine, judges[id(attempt)], direction, entry))
        attempt.run(lambda attempt=attempt, timing=timing: _store_timings(attempt, machine, direction, (timing,)))  # type: ignore[misc]
        _flag_telemetry(attempt, machine)


@contextlib.contextmanager
def _own_scope(attempt: Attempt, prepared: PreparedBackend) -> Iterator[None]:
    """Enter a rival's scope with what it has set for itself: no rival's settings make another one slower."""
    with attempt.own_state(), prepared.scope():
        yield


def _make_last_of_rival(attempt: Attempt, machine: Machine, judge: Judge, direction: str, entry: Entry) -> None:
    with entry.scope():
        _make_last(attempt, machine, judge, direction, entry.timer, as_timed(entry.call))


def _make_last(attempt: Attempt, machine: Machine, judge: Judge, direction: str, timer: Timer, call: TimedCall) -> None:
    """Make a call more whose results are kept; before it, note what forwards take, and compare steps with others."""
    if direction == "forward":
        counted = count_forwards(attempt, judge) if machine.gpu is None else None
        if attempt.with_gradients:
            time_forwards(attempt, judge, OneCall(attempt, machine), call, counted)
    if direction == "step":
        check_steps(attempt, judge, OneCall(attempt, machine))
    judge.make_last(direction, timer, call)


def _sample_interleaved(
    entries: list[tuple[Attempt, Entry]], machine: Machine, direction: str, started: Callable[[], None]
) -> list[Timing]:
    """Sample all entries; an entry that fails is removed with its status, and the others start over."""

    def read_clocks(position: int) -> None:
        machine.watch.look()
        entries[position][0].telemetry.extend(machine.reading())

    while entries:
        measuring = entries[0][0].request.measuring
        machine.watch.begin(alone=len(entries) == 1)
        try:
            return sample_rivals(
                [entry for _, entry in entries],
                _rule(measuring),
                order=abba_order,
                rest_s=_rest_s(measuring),
                settle=settling([attempt for attempt, _ in entries], machine, direction),
                started=started,
                after_block=read_clocks,
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
    """Store the samples of one pass, and derive flags and metrics.

    Raises:
        Stopped: the time is shorter than any right result's.
    """
    measured, window = attempt.passes[direction], machine.watch.window(timings[0])
    apart = disagreements(timings, measured.kernels)
    flags = timing_flags(timings[0], timings[1:], machine.environment.get("event_quantum_us", 0.0))
    flags |= window_flags(window, machine.environment.get("max_sm_clock_mhz"))
    flags |= {"timers_disagree"} if apart else set()
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
    )


def _flag_telemetry(attempt: Attempt, machine: Machine) -> None:
    attempt.flags |= telemetry_flags(attempt.telemetry, machine.environment.get("max_sm_clock_mhz"))


def _flag_clocks(attempts: Sequence[Attempt]) -> None:
    standing = [attempt for attempt in attempts if attempt.status == "ok"]
    for direction in attempts[0].request.measuring.passes:
        if clocks_differ([clock_of(one.passes[direction].window, one.telemetry) for one in standing]):
            for attempt in standing:
                attempt.flags.add("clock_mismatch")


def _rule(measuring: Measuring) -> StoppingRule:
    return StoppingRule(
        measuring.precision, measuring.min_rounds, measuring.max_rounds, measuring.budget_s, measuring.patience_s
    )


def _rest_s(measuring: Measuring) -> float:
    return BURST_REST_S if measuring.regime == "burst" else 0.0
