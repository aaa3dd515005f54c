"""Measure: one job, or several rivals side by side, from request to record. Where time is measured."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from attn_exp.backends.compile import forget
from attn_exp.core.flags import clocks_differ, telemetry_flags, timing_flags
from attn_exp.core.hardware import datasheet_peak
from attn_exp.core.metrics import implausibility, pass_metrics
from attn_exp.core.paired_test import abba_order
from attn_exp.core.record import Measuring, Record, Request, Timing
from attn_exp.timers import make_timer
from attn_exp.timers.graph import CaptureFailed
from attn_exp.timers.kernel import ProfilerLost
from attn_exp.timers.loop import Call, Entry, RivalFailed, StoppingRule, Timer, sample, sample_rivals, single_block
from attn_exp.timers.sync import synchronize
from attn_exp.worker.attempt import Attempt, Stopped
from attn_exp.worker.device import Machine
from attn_exp.worker.nvtx import marked
from attn_exp.worker.prepare import PreparedBackend, name_kernels, prepare

# An H200's power cap was seen to set in after 15 to 30 ms of load; a tenth of a second of rest undoes it.
BURST_REST_S = 0.1
_SECOND_OPINION_US = 10_000.0
_SECOND_OPINION_CALLS = (4, 12)


def measure(request: Request, machine: Machine) -> Record:
    """Measure one job."""
    return measure_and_keep(request, machine)[0]


def measure_and_keep(request: Request, machine: Machine) -> tuple[Record, PreparedBackend | None]:
    """Measure one job, and keep what was measured for whoever looks at it next; None if it was not `ok`."""
    attempt, prepared = Attempt(request), list[PreparedBackend]()
    with marked("job", request.job, request.device):
        attempt.run(lambda: _measure(attempt, machine, prepared))
    return attempt.record(machine), prepared[0] if attempt.status == "ok" else None


def measure_interleaved(requests: Sequence[Request], machine: Machine) -> list[Record]:
    """Measure rivals of one case side by side: in every round one block each, in ABBA order.

    Samples of different records with the same round index belong together. A rival that cannot be measured ends with
    its status, and the others go on without it.
    """
    forget()
    attempts = [Attempt(request) for request in requests]
    rivals: list[tuple[Attempt, PreparedBackend]] = []
    for attempt in attempts:
        attempt.run(lambda attempt=attempt: rivals.append((attempt, prepare(attempt, machine))))  # type: ignore[misc]
    for direction in requests[0].measuring.passes:
        standing = [(attempt, rival) for attempt, rival in rivals if attempt.status == "ok"]
        with marked("pass", direction, machine.device):
            _time_side_by_side(standing, machine, direction)
    for attempt, rival in rivals:
        if attempt.status == "ok":
            attempt.run(partial(_judge_again, attempt, rival))
    _flag_clocks(attempts)
    return [attempt.record(machine) for attempt in attempts]


def _measure(attempt: Attempt, machine: Machine, prepared: list[PreparedBackend]) -> None:
    forget()
    rival = prepare(attempt, machine)
    prepared.append(rival)
    with rival.scope():
        attempt.telemetry += machine.reading()
        for direction in attempt.request.measuring.passes:
            with marked("pass", direction, machine.device):
                launched = name_kernels(attempt, machine, rival, direction) + 1
                _time_alone(attempt, machine, rival.calls[direction], direction, launched)
            attempt.telemetry += machine.reading()
    _judge_again(attempt, rival)
    _flag_telemetry(attempt, machine)


def _judge_again(attempt: Attempt, rival: PreparedBackend) -> None:
    """What was timed is every call but the first: raise Stopped unless those are right as well."""
    with attempt.stage("accuracy"), rival.scope():
        wrong = rival.wrong()
    if wrong:
        raise Stopped("inaccurate", f"the first call was right, one after the timing is not: {wrong}")


def _time_alone(attempt: Attempt, machine: Machine, call: Call, direction: str, launched: float) -> None:
    measuring = attempt.request.measuring
    timer = _timer(attempt.request, measuring.timer, machine)
    others: list[Timing] = []

    def amid() -> None:
        with attempt.stage("second_opinions"):
            others.extend(_second_opinions(attempt, machine, timer, call))

    with attempt.stage("timing"):
        try:
            ranking = sample(timer, call, _rule(measuring), kernels=launched, rest_s=_rest_s(measuring), amid=amid)
        except CaptureFailed as error:
            raise Stopped("unsupported", f"{direction}: no CUDA graph can hold this call: {error}") from error
    _conclude(attempt, machine, direction, (ranking, *others))


def _time_side_by_side(rivals: Sequence[tuple[Attempt, PreparedBackend]], machine: Machine, direction: str) -> None:
    entries: list[tuple[Attempt, Entry]] = []
    for attempt, rival in rivals:

        def enter(attempt: Attempt = attempt, rival: PreparedBackend = rival) -> None:
            attempt.telemetry += machine.reading()
            with rival.scope():
                launched = name_kernels(attempt, machine, rival, direction) + 1
            measuring = attempt.request.measuring
            timer = _timer(attempt.request, measuring.timer, machine)
            entries.append((attempt, Entry(timer, rival.calls[direction], rival.scope, launched)))

        attempt.run(enter)
    timings = _sampled_together(entries, machine, direction)
    for (attempt, _), timing in zip(entries, timings, strict=True):
        attempt.run(lambda attempt=attempt, timing=timing: _conclude(attempt, machine, direction, (timing,)))  # type: ignore[misc]
        _flag_telemetry(attempt, machine)


def _sampled_together(entries: list[tuple[Attempt, Entry]], machine: Machine, direction: str) -> list[Timing]:
    """The timings of all entries; one that fails is taken out with its status, and the others begin anew."""

    def read_clocks(position: int) -> None:
        entries[position][0].telemetry.extend(machine.reading())

    while entries:
        measuring = entries[0][0].request.measuring
        try:
            return sample_rivals(
                [entry for _, entry in entries],
                _rule(measuring),
                order=abba_order,
                rest_s=_rest_s(measuring),
                after_block=read_clocks,
            )
        except RivalFailed as failed:
            attempt, _ = entries.pop(failed.position)
            attempt.run(partial(_raise, direction, failed.cause))
    return []


def _raise(direction: str, cause: Exception) -> None:
    if isinstance(cause, CaptureFailed):
        raise Stopped("unsupported", f"{direction}: no CUDA graph can hold this call: {cause}") from cause
    raise cause


def _conclude(attempt: Attempt, machine: Machine, direction: str, timings: tuple[Timing, ...]) -> None:
    """Keep the samples of one pass, and make flags and metrics of them. Raises Stopped if they are impossible."""
    case = attempt.request.case
    attempt.passes[direction] = measured = replace(attempt.passes[direction], timings=timings)
    attempt.flags |= timing_flags(timings[0], timings[1:], machine.environment.get("event_quantum_us", 0.0))
    peak = datasheet_peak(machine.environment.get("gpu", ""))
    impossible = implausibility(case, direction, timings[0], peak, measured.work)
    if impossible:
        raise Stopped("implausible", impossible)
    attempt.metrics |= pass_metrics(
        case, direction, measured, saves_lse=attempt.with_gradients, ceilings=attempt.ceilings, peak=peak
    )


def _second_opinions(attempt: Attempt, machine: Machine, timer: Timer, call: Call) -> list[Timing]:
    """A block each by the other timers, amid the rounds of the one that ranks: seconds later clocks would differ."""
    began = time.perf_counter()
    call()
    synchronize(machine.device)
    call_us = (time.perf_counter() - began) * 1e6
    fewest, most = _SECOND_OPINION_CALLS
    calls = max(fewest, min(most, int(_SECOND_OPINION_US / call_us)))
    found = []
    for name in attempt.request.measuring.also:
        if name == "event" and timer.name == "device" and not getattr(timer, "blocked", True):
            continue  # where the device timer runs unblocked, it does what `event` does
        try:
            found.append(single_block(_timer(attempt.request, name, machine), call, calls))
        except ProfilerLost:
            attempt.flags.add("profiler_lossy")
        except CaptureFailed:
            attempt.flags.add("no_graph")
    return found


def _flag_telemetry(attempt: Attempt, machine: Machine) -> None:
    attempt.flags |= telemetry_flags(attempt.telemetry, machine.environment.get("max_sm_clock_mhz"))


def _flag_clocks(attempts: Sequence[Attempt]) -> None:
    standing = [attempt for attempt in attempts if attempt.status == "ok"]
    if clocks_differ([attempt.telemetry for attempt in standing]):
        for attempt in standing:
            attempt.flags.add("clock_mismatch")


def _timer(request: Request, name: str, machine: Machine) -> Timer:
    return make_timer(name, machine.gpu, request.measuring.l2, request.config.get("timer"))


def _rule(measuring: Measuring) -> StoppingRule:
    return StoppingRule(measuring.precision, measuring.min_rounds, measuring.max_rounds, measuring.budget_s)


def _rest_s(measuring: Measuring) -> float:
    return BURST_REST_S if measuring.regime == "burst" else 0.0
