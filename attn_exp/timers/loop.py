"""The sampling loop of all timers: warm up, sample in rounds, stop by a rule.

The clock is read in a timer's `block`: on a GPU CUDA events (event.py), on a CPU `perf_counter_ns` (cpu.py).
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from attn_exp.core.moment import moment
from attn_exp.core.process import without_collections
from attn_exp.core.record import Timing
from attn_exp.core.stats import round_medians
from attn_exp.timers.settle import Load
from attn_exp.timers.stopping import StoppingRule
from attn_exp.timers.timed_call import Call

WARM_UP_US = 25_000.0
WARM_UP_CALLS = (3, 300)
# Of a single call: the interval needs many rounds more than long ones. Rivals share a round, and with it clocks.
ROUND_US, RIVALS_ROUND_US = 5_000.0, 15_000.0
ROUND_CALLS = (1, 50)
# The launch queue holds about 1,024 kernels; a block that fills it stalls the host behind the blocker.
ROUND_KERNELS = 800


@dataclass(frozen=True)
class Cost:
    """The cost of one call as its timer runs it.

    Attributes:
        time_us: the call's time in microseconds.
        around_us: the wall time of flush and blocker in microseconds.
        kernels: how many kernels the call launches.
    """

    time_us: float
    around_us: float = 0.0
    kernels: float = 1.0

    def calls_in(self, round_us: float) -> int:
        """Return the number of calls that takes nearest to `round_us` and fits the launch queue."""
        wanted = round(round_us / (self.time_us + self.around_us))
        queue = math.floor(ROUND_KERNELS / max(1.0, self.kernels))
        return max(ROUND_CALLS[0], min(ROUND_CALLS[1], wanted, queue))

    @property
    def warm_up_calls(self) -> int:
        """Return the number of calls that take 25 ms, at least 3 and at most 300."""
        wanted = math.ceil(WARM_UP_US / (self.time_us + self.around_us))
        return max(WARM_UP_CALLS[0], min(WARM_UP_CALLS[1], wanted))


@dataclass
class Block:
    """One block of calls: one sample for each call in microseconds, flags, and the timer's other figures as notes."""

    times_us: list[float]
    flags: tuple[str, ...] = ()
    notes: dict[str, float] = field(default_factory=dict)


class Timer(Protocol):
    """A timer. `name` and `l2` go into the record; `block` times `calls` calls in a row."""

    name: str
    l2: str
    # Whether `block` needs `estimate` to run first.
    estimates: bool

    def estimate(self, call: Call) -> Cost:
        """Estimate the cost of one call from a few calls."""
        ...

    def block(self, call: Call, calls: int) -> Block:
        """Time `calls` calls, one sample each."""
        ...


@dataclass
class _Samples:
    times_us: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    notes: dict[str, list[float]] = field(default_factory=dict)
    spans: list[tuple[int, float, float]] = field(default_factory=list)

    def join(self) -> None:
        """Make one round of every two."""
        self.rounds = [index // 2 for index in self.rounds]
        self.spans = [(index // 2, begin, end) for index, begin, end in self.spans]

    def add(self, block: Block, index: int, untimed: int, began: float) -> None:
        """Add a block's samples but the first `untimed`."""
        self.spans.append((index, began, time.perf_counter()))
        times_us = block.times_us[untimed:]
        self.times_us += times_us
        self.rounds += [index] * len(times_us)
        self.flags.update(block.flags)
        for name, value in block.notes.items():
            self.notes.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Entry:
    """A call to sample with its timer and scope.

    The number of `kernels` that it launches limits the calls of a round.
    """

    timer: Timer
    call: Call
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    kernels: float = 1.0


def sample(timer: Timer, call: Call, rule: StoppingRule, *, kernels: float = 1.0, **options: Any) -> Timing:
    """Sample one call; `options` are those of `sample_rivals`. Raises what the call raises."""
    try:
        return sample_rivals([Entry(timer, call, kernels=kernels)], rule, **options)[0]
    except RivalFailed as failed:
        raise failed.cause from None


def sample_rivals(
    entries: Sequence[Entry],
    rule: StoppingRule,
    *,
    order: Callable[[int, int], Sequence[int]] = lambda rivals, index: range(rivals),
    rest_s: float = 0.0,
    settle: Callable[[Load, Sequence[Cost]], float | None] | None = None,
    started: Callable[[], None] = lambda: None,
    midway: Callable[[], None] | None = None,
    after_block: Callable[[int], None] = lambda position: None,
) -> list[Timing]:
    """Warm each call up as its timer runs it, then sample all in rounds until `rule` stops.

    Args:
        entries: what to time; inputs are built, graphs compiled, and each has run at least once.
        rule: when to stop: by the median of a single call, by the pairwise ratios of several.
        order: the order of the rivals in a round, from their number and the round's index.
        rest_s: seconds of idle time before each block.
        settle: called once, after the warm-up, with what loads the device, and each call's cost. It returns the seconds
            that a single call must be sampled at least, or None if the device has not settled: then the flag is
            `unsettled`, and nothing is `precise`.
        started: called once, right before the first round.
        midway: called once, halfway through the least number of rounds, for blocks of other timers at the same clocks.
        after_block: called after each block with the index of its entry.

    Raises:
        RivalFailed: an entry raised.

    Returns:
        One timing for each entry. Samples of different entries with the same round index were interleaved. Rivals make
        equally many calls in a round, and each of their blocks begins with one more, which is no sample.
    """
    entered = time.perf_counter()
    costs = []
    for position, entry in enumerate(entries):
        with _naming(position):
            costs.append(_warmed_up(entry))
    calls, untimed = costs[0].calls_in(ROUND_US), 0
    if len(entries) > 1:
        costs = _alike(entries, costs)
        # A call's place in its block is part of its time: in a block of one, every call is the first after the others.
        calls, untimed = min(cost.calls_in(RIVALS_ROUND_US) for cost in costs), 1
        # Rivals have a budget that is enough for their ratio.
        rule = replace(rule, patience_s=0.0)
    all_samples = [_Samples() for _ in entries]
    longest_us = max(cost.time_us for cost in costs)

    def load(seconds: float) -> float:
        found: list[list[float]] = [[] for _ in entries]
        since = time.perf_counter()
        while time.perf_counter() - since < seconds or not all(found):
            for position, entry in enumerate(entries):
                with _naming(position), entry.scope():
                    found[position] += entry.timer.block(entry.call, calls).times_us
        return sum(map(statistics.median, found))

    least_s = 0.0 if settle is None else settle(load, costs)
    if least_s is None:
        rule = replace(rule, precision=0.0)
        for samples in all_samples:
            samples.flags.add("unsettled")
    elif len(entries) == 1:
        # Rivals swing together, and their ratio stays.
        rule = replace(rule, least_s=least_s)
    started()
    began, index, reason = time.perf_counter(), 0, None
    # How many blocks of a call are one round.
    blocks = 1
    load_s = began - entered
    # A collection inside a block would be timed as part of a call.
    with without_collections():
        while reason is None:
            if midway is not None and index == rule.least_rounds(longest_us) // 2:
                paused = time.perf_counter()
                midway()
                began += time.perf_counter() - paused
            for _, position in itertools.product(range(blocks), order(len(entries), index)):
                entry = entries[position]
                if rest_s:
                    time.sleep(rest_s)
                with _naming(position, index + 1), entry.scope():
                    since = time.perf_counter()
                    block = entry.timer.block(entry.call, untimed + calls)
                    all_samples[position].add(block, index, untimed, since)
                after_block(position)
            index += 1
            medians = [round_medians(samples.times_us, samples.rounds) for samples in all_samples]
            about = statistics.median(all_samples[0].times_us) if len(entries) == 1 else None
            reason = rule.verdict(_series(medians), longest_us, time.perf_counter() - began, about)
            if reason is None and index >= rule.max_rounds:
                for samples in all_samples:
                    samples.join()
                index, blocks = math.ceil(index / 2), 2 * blocks
    return [
        Timing(
            timer=entry.timer.name,
            l2=entry.timer.l2,
            times_us=tuple(samples.times_us),
            rounds=tuple(samples.rounds),
            stop_reason=reason,
            notes={
                "calls_per_round": float(calls * blocks),
                "warm_up_calls": float(cost.warm_up_calls),
                "load_s": load_s,
            }
            | {name: statistics.median(values) for name, values in samples.notes.items()},
            flags=tuple(sorted(samples.flags)),
            blocks=tuple((index, moment(begin), moment(end)) for index, begin, end in samples.spans),
        )
        for entry, samples, cost in zip(entries, all_samples, costs, strict=True)
    ]


class RivalFailed(Exception):
    """The entry at `position` raised in a round (from 1 on), or before the first one; its exception is the cause."""

    def __init__(self, position: int, cause: Exception, round_: int | None = None) -> None:
        super().__init__(str(cause))
        self.position = position
        self.cause = cause
        self.round = round_


@contextlib.contextmanager
def _naming(position: int, round_: int | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any exception must be assigned to its entry
        raise RivalFailed(position, error, round_) from error


def _warmed_up(entry: Entry) -> Cost:
    with entry.scope():
        cost = entry.timer.estimate(entry.call)
        cost = replace(cost, kernels=max(cost.kernels, entry.kernels))
        left, at_once = cost.warm_up_calls, cost.calls_in(RIVALS_ROUND_US)
        while left > 0:
            entry.timer.block(entry.call, min(left, at_once))
            left -= at_once
    return cost


@runtime_checkable
class Looping(Protocol):
    """A timer whose samples are means of `loops` calls."""

    loops: int


def _alike(entries: Sequence[Entry], costs: Sequence[Cost]) -> list[Cost]:
    """Let the samples of all rivals be means of equally many calls, and return what they cost then.

    It is as many as the shortest call needs, but no more than fill a round of the longest.
    """
    timers = [entry.timer for entry in entries if isinstance(entry.timer, Looping)]
    if len(timers) < len(entries):
        return list(costs)
    a_call_us = [cost.time_us / timer.loops for cost, timer in zip(costs, timers, strict=True)]
    most = max(1, math.floor(RIVALS_ROUND_US / max(a_call_us)))
    loops = min(most, max(timer.loops for timer in timers))
    alike = [
        replace(cost, time_us=loops * us, around_us=cost.around_us * loops / timer.loops)
        for cost, timer, us in zip(costs, timers, a_call_us, strict=True)
    ]
    for timer in timers:
        timer.loops = loops
    return alike


def _series(medians: Sequence[list[float]]) -> list[list[float]]:
    """Return what has to be precise: a single call's medians, or every pair's ratios round by round."""
    if len(medians) == 1:
        return [medians[0]]
    return [
        [first / second for first, second in zip(one, other, strict=True)]
        for one, other in itertools.combinations(medians, 2)
    ]


def single_block(timer: Timer, call: Call, calls: int) -> Timing:
    """Time one block of a warmed-up call with a secondary timer."""
    if timer.estimates:
        timer.estimate(call)
    block = timer.block(call, calls)
    return Timing(
        timer=timer.name,
        l2=timer.l2,
        times_us=tuple(block.times_us),
        rounds=(0,) * len(block.times_us),
        stop_reason="one_block",
        notes=block.notes,
        flags=block.flags,
    )
