"""Measure the jobs of a case in turns, from requests to records: prepare all, time them in rounds, check them again.

The loop is attn_exp/timers/loop.py; the clock is read in a timer's `block`.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from attn_exp.attention.contents import change_all
from attn_exp.backends.base import Backend
from attn_exp.backends.compile import reset_dynamo
from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.core.record.flags import duty_flags, telemetry_flags, timing_flags, window_flags
from attn_exp.core.record.metrics import pass_metrics
from attn_exp.core.record.record import Paired, Record, Timing
from attn_exp.core.record.request import Measuring, Request
from attn_exp.core.record.timers import disagreements
from attn_exp.core.stats.paired import paired_by_round
from attn_exp.core.stats.summary import medians_by_round
from attn_exp.timers.call import seconds, synchronize
from attn_exp.timers.graph import CaptureFailed
from attn_exp.timers.loop import Entry, Timer, sample_turns
from attn_exp.timers.stopping import StoppingRule
from attn_exp.worker.attempt import Attempt, Stopped, is_poisoned, marked, status_of
from attn_exp.worker.check.timed import Draw, TimedCheck
from attn_exp.worker.determinism import measure_determinism
from attn_exp.worker.kernels import name_kernels
from attn_exp.worker.limits import check_limits
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.memory import call_memory
from attn_exp.worker.machine.settings import OwnState
from attn_exp.worker.prepare import PreparedBackend, prepare
from attn_exp.worker.secondary import secondary_timings, timer_for
from attn_exp.workloads.base import Workload

# The flush.
_KERNELS_AROUND = 1
Given = tuple[Backend, Workload] | None
# After these a job has run nothing, or has no memory to spare.
_UNTOUCHED = ("ok", "unsupported", "unavailable", "out_of_memory")
_UNTOLD = "the inputs that rivals share were changed while they were timed, and no call of them did it again"


class Poisoned(Exception):
    """The GPU's context is lost: jobs without a record have to be measured by another process."""


@dataclass
class Turns:
    """What a case's jobs tell while they are measured.

    Attributes:
        at: called with the index of the job that is at work, or with None if several take turns.
        keep: called with the index and the record of each job that is done.
        profile: called with the index, the record and the prepared calls of each job, the others being freed.
        beside: whether the last job has a record, with which the others are compared, and is measured once more.
        apart: whether the case has other jobs that take no turns with these.
    """

    at: Callable[[int | None], None] = lambda position: None
    keep: Callable[[int, Record], None] = lambda position, record: None
    profile: Callable[[int, Record, PreparedBackend], None] | None = None
    beside: bool = False
    apart: bool = False


def measure(request: Request, machine: Machine, given: Given = None) -> Record:
    """Measure one job and return its record; `given` replaces the backend and the workload that the request names."""
    return measure_case([request], machine, [given])[0]


def measure_case(
    requests: Sequence[Request], machine: Machine, given: Sequence[Given] = (), turns: Turns | None = None
) -> list[Record]:
    """Measure the jobs of one case in turns and return their records, all but that of a job beside them.

    A job that cannot be measured ends with its status, and the others continue. One that the memory does not hold
    beside the others is measured alone once they are freed. `given` has functions and tensors of the user's own.

    Raises:
        Poisoned: the GPU's context is lost.
    """
    turns = turns or Turns()
    reset_dynamo()
    case = _Case(list(requests), machine, list(given) or [None] * len(requests), turns)
    try:
        case.measure()
    finally:
        machine.shared = machine.signs = None
        reset_dynamo()
    return [record for record in case.records if record is not None]


@dataclass
class _Rival:
    """A job in its turns."""

    position: int
    attempt: Attempt
    prepared: PreparedBackend | None = None
    checks: dict[str, TimedCheck] = field(default_factory=dict)
    timers: dict[str, Timer] = field(default_factory=dict)

    @property
    def stands(self) -> bool:
        """Whether it takes turns."""
        return self.prepared is not None and self.attempt.status == "ok"

    @property
    def ready(self) -> PreparedBackend:
        """What is prepared of a job that stands."""
        assert self.prepared is not None
        return self.prepared

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Enter its scope with what it has set for itself: no rival's settings make another one slower."""
        with self.attempt.own_state(), self.ready.scope():
            yield


class _Case:
    def __init__(self, requests: list[Request], machine: Machine, given: list[Given], turns: Turns) -> None:
        self.records: list[Record | None] = [None] * (len(requests) - turns.beside)
        self._requests, self._machine, self._given, self._turns = requests, machine, given, turns
        self._rivals = [
            _Rival(position, Attempt(request, given=functions, own=OwnState(machine.settings)))
            for position, (request, functions) in enumerate(zip(requests, given, strict=True))
        ]
        # Jobs to measure alone, once the others are freed.
        self._later: list[int] = []

    def measure(self) -> None:
        """Prepare all, time each pass in turns, check what was timed, and keep the records."""
        if len(self._rivals) > 1:
            self._machine.shared = {}
        for rival in self._rivals:
            self._prepare(rival)
        passes = self._requests[0].measuring.passes
        for direction in passes:
            with marked("pass", direction, self._machine.device):
                self._time(direction)
        for rival in self._standing():
            self._turns.at(rival.position)
            rival.attempt.run(partial(self._check_again, rival))
            self._settle(rival)
        if len(self._rivals) > 1:
            # Comparing bits and profiling take the memory to themselves.
            for rival in self._rivals:
                rival.prepared = None
                rival.checks.clear()
            self._machine.shared = self._machine.signs = None
            gc.collect(1)
        for rival, record in zip(self._rivals, self.records, strict=False):
            if record is None and rival.position not in self._later:
                self._finish(rival)
        self._rivals.clear()
        for position in self._later:
            self._alone(position)

    def _standing(self) -> list[_Rival]:
        return [rival for rival in self._rivals if rival.stands]

    def _prepare(self, rival: _Rival) -> None:
        def prepared() -> None:
            rival.prepared = prepare(rival.attempt, self._machine)

        self._turns.at(rival.position)
        rival.attempt.run(prepared)
        self._settle(rival)
        if rival.attempt.status not in _UNTOUCHED and self._machine.shared:
            self._restore()

    def _restore(self) -> None:
        """Give the next rivals the inputs of the seed: one that failed may have written into them."""
        if standing := self._standing():
            standing[0].ready.check.contents.write(standing[0].ready.check.seeded())
        else:
            self._machine.shared = {}

    def _settle(self, rival: _Rival) -> None:
        """Keep the record of a job that has failed, free what it has, and see whether the others can go on.

        Raises:
            Poisoned: they cannot.
        """
        status = rival.attempt.status
        if status == "ok":
            return
        rival.prepared = None
        rival.checks.clear()
        gc.collect(1)
        lost = status == "error" and is_poisoned(self._machine.device)
        if status == "out_of_memory" and len(self._rivals) > 1:
            self._later.append(rival.position)
        else:
            self._keep(rival)
        if lost:
            raise Poisoned

    def _keep(self, rival: _Rival) -> None:
        if rival.position >= len(self.records):
            return
        if self._turns.apart:
            rival.attempt.flags.add("apart")
        record = rival.attempt.record(self._machine)
        self.records[rival.position] = record
        self._turns.keep(rival.position, record)

    def _alone(self, position: int) -> None:
        """Measure a job by itself."""
        profile = self._turns.profile
        self._turns.at(position)
        turns = replace(
            self._turns, at=lambda at: None, keep=lambda at, record: self._turns.keep(position, record), beside=False,
            profile=profile and (lambda at, record, prepared: profile(position, record, prepared)), apart=True,
        )  # fmt: skip
        if position < len(self.records):
            (self.records[position],) = measure_case(
                [self._requests[position]], self._machine, [self._given[position]], turns
            )

    def _time(self, direction: str) -> None:
        """Time a pass of all that stand; again if some of them changed the inputs of all."""
        while standing := self._standing():
            entries = [self._entry(rival, direction) for rival in standing]
            rivals = [rival for rival, entry in zip(standing, entries, strict=True) if entry is not None]
            timings = self._sample(rivals, [entry for entry in entries if entry is not None], direction)
            if not self._changed_inputs(rivals, direction):
                break
            for rival in rivals:
                # Of inputs that another one changed.
                if rival.stands:
                    rival.checks[direction].kept.clear()
        else:
            return
        measured = [
            (rival, timing)
            for rival, timing in zip(rivals, timings, strict=True)
            if timing is not None and rival.stands
        ]
        for rival, timing in measured:
            self._store(rival, timing, direction)
        self._pair([one for one in measured if one[0].stands], direction)

    def _entry(self, rival: _Rival, direction: str) -> Entry | None:
        """Return a pass as the sampling loop takes it, with its kernels named; None if that fails."""
        made = list[Entry]()

        def enter() -> None:
            attempt, prepared, measuring = rival.attempt, rival.ready, rival.attempt.request.measuring
            # Whose memory it is can only be told if the GPU is not shared.
            attempt.telemetry += self._machine.reading()
            with prepared.scope():
                call = prepared.begin(direction)
                launched = name_kernels(attempt, self._machine, prepared, direction) + _KERNELS_AROUND
                check = rival.checks[direction] = prepared.check.timed(direction)
                timer = rival.timers[direction] = timer_for(attempt.request, measuring.timer, self._machine)
            made.append(Entry(timer, call, rival.scope, launched, check.after_block))

        if len(self._standing()) > 1:
            self._turns.at(rival.position)
        rival.attempt.run(enter)
        self._settle(rival)
        return made[0] if made and rival.stands else None

    def _sample(self, rivals: Sequence[_Rival], entries: Sequence[Entry], direction: str) -> list[Timing | None]:
        """Sample all entries; a rival that fails leaves with its status."""
        if not rivals:
            return []
        measuring, machine = rivals[0].attempt.request.measuring, self._machine
        draw = Draw(whole=rivals[0].attempt.request.case.workload is not None)

        def before_round(number: int, last: bool) -> None:
            slot = draw.slot(number, last)
            standing = [rival for rival in rivals if rival.stands]
            for rival in standing:
                rival.checks[direction].begin(slot)
            if slot is not None and standing:
                change_all([rival.ready.check.contents for rival in standing], direction)

        def failed(position: int, error: Exception, number: int | None) -> None:
            attempt = rivals[position].attempt
            # Its traceback belongs into its own log.
            self._turns.at(rivals[position].position)
            attempt.run(partial(_raise, direction, error))
            self._turns.at(None if len(rivals) > 1 else rivals[0].position)
            machine.announce("time")
            if number is not None and attempt.reason is not None:
                attempt.reason = f"{direction}, round {number + 1}: {attempt.reason}"
            if len(rivals) > 1 and is_poisoned(machine.device):
                # Any of them may be to blame: the GPU says it late.
                raise Poisoned from error

        self._turns.at(None if len(rivals) > 1 else rivals[0].position)
        machine.announce("time")
        machine.watch.begin(alone=len(rivals) == 1 or measuring.regime == "sustained")
        began = time.perf_counter()
        try:
            timings = sample_turns(
                entries,
                _rule(measuring),
                card=machine.card,
                sustained=measuring.regime == "sustained",
                before_round=before_round,
                done=machine.watch.look,
                failed=failed,
            )
        finally:
            machine.watch.end()
        for rival in rivals:
            rival.attempt.stages_s["timing"] = rival.attempt.stages_s.get("timing", 0.0) + time.perf_counter() - began
            rival.attempt.telemetry += machine.reading()
        for rival in rivals:
            self._settle(rival)
        return timings

    def _changed_inputs(self, rivals: Sequence[_Rival], direction: str) -> bool:
        """Compare the bits of the inputs with what they were; who changed them is inaccurate.

        Return whether others have to be timed again, since they shared these inputs.
        """
        standing = [rival for rival in rivals if rival.stands]
        if not standing:
            return False
        seeded = standing[0].ready.check.seeded()
        changed = [rival for rival in standing if rival.ready.check.contents.written(seeded)]
        if not changed:
            return False
        if len(rivals) == 1:
            self._refuse(changed[0], str(changed[0].ready.check.contents.written(seeded)))
            return False
        found = False
        for rival in changed:
            for other in self._standing():
                other.ready.check.contents.write(seeded)
            with rival.scope():
                rival.ready.calls[direction]()
            synchronize(self._machine.device)
            if name := rival.ready.check.contents.written(seeded):
                self._refuse(rival, name)
                found = True
        for rival in changed:
            if not rival.stands:
                continue
            rival.ready.check.contents.write(seeded)
            if not found:
                # None did it again: each is measured alone, with inputs of its own.
                rival.attempt.status, rival.attempt.reason, rival.prepared = "error", _UNTOLD, None
                self._later.append(rival.position)
        return found

    def _refuse(self, rival: _Rival, name: str) -> None:
        rival.attempt.status = "inaccurate"
        rival.attempt.reason = f"the backend wrote into its input {name}"
        self._settle(rival)

    def _store(self, rival: _Rival, timing: Timing, direction: str) -> None:
        """Store the samples of one pass with those of other timers, and derive flags and metrics."""

        def store() -> None:
            attempt, machine = rival.attempt, self._machine
            timings = [timing]
            with attempt.stage("second_opinions"), rival.ready.scope():
                call = rival.ready.calls[direction]
                timings += secondary_timings(attempt, machine, direction, rival.timers[direction], call)
            measured, window = attempt.passes[direction], machine.watch.window(timing)
            apart = disagreements(tuple(timings), measured.kernels)
            flags = timing_flags(timing, tuple(timings[1:]), machine.environment.get("event_quantum_us", 0.0))
            flags |= window_flags(window, machine.environment.get("max_sm_clock_mhz")) | duty_flags(timing)
            flags |= {"timers_disagree"} if apart else set()
            attempt.passes[direction] = replace(
                measured, timings=tuple(timings), disagreements=apart, flags=tuple(sorted(flags)), window=window
            )
            attempt.flags |= flags | telemetry_flags(attempt.telemetry, machine.environment.get("max_sm_clock_mhz"))
            check_limits(attempt, machine, direction, datasheet_peak(machine.environment.get("gpu", "")))
            self._metrics(attempt, direction)

        rival.attempt.run(store)
        self._settle(rival)

    def _pair(self, measured: Sequence[tuple[_Rival, Timing]], direction: str) -> None:
        """Compare each with the job beside them, or else with the fastest."""
        if len(measured) < 2:
            return
        base, of_base = min(measured, key=lambda one: statistics.median(one[1].times_us))
        beside = next((one for one in measured if one[0].position >= len(self.records)), None)
        if beside is not None:
            base, of_base = beside
        job, times = base.attempt.request.job, medians_by_round(of_base.times_us, of_base.rounds)
        for rival, timing in measured:
            paired = Paired(base=job)
            if rival is not base:
                found = paired_by_round(medians_by_round(timing.times_us, timing.rounds), times)
                if found is None:
                    continue
                paired = Paired(
                    base=job, log_ratio=found.log_ratio, half=found.half, rounds=found.rounds,
                    timing=None if beside is None else of_base,
                )  # fmt: skip
            passes = rival.attempt.passes
            passes[direction] = replace(passes[direction], paired=paired)

    def _metrics(self, attempt: Attempt, direction: str) -> None:
        attempt.metrics |= pass_metrics(
            attempt.request.case,
            direction,
            attempt.passes[direction],
            saves_lse=attempt.with_gradients,
            ceilings=attempt.ceilings,
            peak=datasheet_peak(self._machine.environment.get("gpu", "")),
            compiled=attempt.compiled,
        )

    def _check_again(self, rival: _Rival) -> None:
        """Check the timed blocks, and measure what the mask takes to build."""
        attempt, prepared = rival.attempt, rival.ready
        self._machine.announce("check")
        gc.collect(1)
        prepared.check.after()
        if prepared.build_mask is not None:
            measure_mask(attempt, self._machine, prepared.build_mask)
            self._metrics(attempt, attempt.request.measuring.passes[0])

    def _finish(self, rival: _Rival) -> None:
        """Keep the record; before that compare bits if that is requested, and after it run the profilers."""
        request, turns = rival.attempt.request, self._turns
        profiles = turns.profile is not None and bool(request.profilers)
        self._turns.at(rival.position)
        if rival.attempt.status == "ok" and (request.measuring.determinism or profiles) and rival.prepared is None:
            again = Attempt(request, given=self._given[rival.position], own=OwnState(self._machine.settings))

            def prepared() -> None:
                rival.prepared = prepare(again, self._machine)
                with rival.prepared.scope():
                    for direction in request.measuring.passes:
                        rival.prepared.begin(direction)

            again.run(prepared)
            if again.status != "ok":
                rival.attempt.status, rival.attempt.reason = again.status, again.reason
        if rival.attempt.status == "ok" and request.measuring.determinism:
            rival.attempt.run(partial(measure_determinism, rival.attempt, self._machine, rival.ready))
            for direction in request.measuring.passes:
                self._metrics(rival.attempt, direction)
        self._keep(rival)
        record = self.records[rival.position]
        if profiles and record is not None and record.status == "ok":
            assert turns.profile is not None
            turns.profile(rival.position, record, rival.ready)
        rival.prepared = None
        gc.collect(1)


def _raise(direction: str, cause: Exception) -> None:
    if isinstance(cause, CaptureFailed):
        raise Stopped("unsupported", f"{direction}: no CUDA graph can hold this call: {cause}") from cause
    raise cause


def _rule(measuring: Measuring) -> StoppingRule:
    return StoppingRule(measuring.precision, measuring.min_rounds, measuring.max_rounds, measuring.budget_s)


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
