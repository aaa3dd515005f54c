"""The sampling loop of all timers: warm up, sample in rounds, stop by a rule.

The clock is read in a timer's `block`: on a GPU CUDA events (event.py), on a CPU `perf_counter_ns` (cpu.py).
"""

import contextlib
import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from attn_exp.core.host.energy import moment
from attn_exp.core.host.process import without_collections
from attn_exp.core.record.record import Timing
from attn_exp.core.stats.summary import round_medians
from attn_exp.timers.call import Call
from attn_exp.timers.pace import Load, Pace
from attn_exp.timers.stopping import LONG_CALL_ROUNDS, StoppingRule

WARM_UP_US = 15_000.0
WARM_UP_CALLS = (3, 150)
# The least rounds of a single call have so many samples, or take so long together: the interval needs many rounds more
# than long ones. Rivals share a round, and with it clocks.
LEAST_SAMPLES, ROUNDS_US, RIVALS_ROUND_US = 240, 30_000.0, 15_000.0
# Blocks under which the device must not rest: the host has its time to enqueue the next one.
LOAD_US = 10_000.0
ROUND_CALLS = (1, 50)
# The launch queue holds about 1,024 kernels; a block that fills it stalls the host behind the blocker.
ROUND_KERNELS = 800
# Load again before the first round, if second opinions came between.
_AGAIN_S = 0.1
# Rounds of a call whose clock swings.
_STRATA = 24


@dataclass(frozen=True)
class Cost:
    """The cost of one call as its timer runs it.

    Attributes:
        time_us: the call's time in microseconds.
        around_us: the time of the flush before it in microseconds.
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
        """Return the number of calls that take 15 ms, at least 3 and at most 150."""
        wanted = math.ceil(WARM_UP_US / (self.time_us + self.around_us))
        return max(WARM_UP_CALLS[0], min(WARM_UP_CALLS[1], wanted))


@dataclass
class Block:
    """One block of calls.

    Attributes:
        times_us: one sample for each call in microseconds.
        flags: problems that occurred.
        notes: the timer's other figures.
        last: the last call's result, for as long as it is needed.
    """

    times_us: list[float]
    flags: tuple[str, ...] = ()
    notes: dict[str, float] = field(default_factory=dict)
    last: Any = None


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


@runtime_checkable
class Queueing(Protocol):
    """A timer whose blocks can be enqueued while the device still runs the one before."""

    def enqueue(self, call: Call, calls: int) -> tuple[Any, Callable[[], Block]]:
        """Enqueue a block; return what the last call returned, and what waits for the block."""
        ...


@dataclass
class _Samples:
    """The samples of one entry, block by block, and the rounds that the blocks make."""

    blocks: list[list[float]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    notes: dict[str, list[float]] = field(default_factory=dict)
    busy_us: float = 0.0
    # How many blocks are one round, or of a heavy call the number of rounds, each of which has blocks of all the time.
    joined: int = 1
    strata: int = 0

    def add(self, done: "_Done", untimed: int, flush_us: float) -> None:
        """Add a block's samples but the first `untimed`."""
        block = done.block
        self.spans.append(done.span)
        self.busy_us += sum(block.times_us) + flush_us * len(block.times_us)
        self.blocks.append(block.times_us[untimed:])
        self.flags.update(block.flags)
        for name, value in block.notes.items():
            self.notes.setdefault(name, []).append(value)

    def round_of(self, number: int) -> int:
        """Return the round of a block; blocks behind the last complete round belong to that."""
        if self.strata:
            # In a random order each time, since neighbours in time are alike.
            order = random.Random(number // self.strata).sample(range(self.strata), self.strata)
            return order[number % self.strata]
        return min(number, len(self.blocks) // self.joined * self.joined - 1) // self.joined

    @property
    def rounds(self) -> tuple[int, ...]:
        """The index of each sample's round."""
        return tuple(self.round_of(number) for number, times_us in enumerate(self.blocks) for _ in times_us)

    @property
    def times_us(self) -> tuple[float, ...]:
        """All samples in time order."""
        return tuple(itertools.chain.from_iterable(self.blocks))

    def medians(self, complete: int) -> list[float]:
        """Return the medians of the first rounds."""
        return round_medians(self.times_us, self.rounds)[:complete]

    def duty(self) -> float:
        """Return the share of the time from the first block to the last in which calls and flushes ran."""
        return min(1.0, self.busy_us / 1e6 / (self.spans[-1][1] - self.spans[0][0]))


@dataclass(frozen=True)
class Entry:
    """A call to sample.

    Attributes:
        timer: its timer.
        call: the call to time.
        scope: the context manager that blocks are enqueued in.
        kernels: how many kernels a call launches, which limits the calls of a round.
        before_block: called with a block's number before it, for example to change the inputs.
        after_block: called with a block's number and its last call's result, once that is enqueued.
    """

    timer: Timer
    call: Call
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    kernels: float = 1.0
    before_block: Callable[[int], None] = lambda number: None
    after_block: Callable[[int, Any], None] = lambda number, last: None


def sample(timer: Timer, call: Call, rule: StoppingRule, *, kernels: float = 1.0, **options: Any) -> Timing:
    """Sample one call; `options` are those of `sample_rivals`. Raises what the call raises."""
    return sample_entry(Entry(timer, call, kernels=kernels), rule, **options)


def sample_entry(entry: Entry, rule: StoppingRule, **options: Any) -> Timing:
    """Sample one entry; `options` are those of `sample_rivals`. Raises what the call raises."""
    try:
        return sample_rivals([entry], rule, **options)[0]
    except RivalFailed as failed:
        raise failed.cause from None


def sample_rivals(
    entries: Sequence[Entry],
    rule: StoppingRule,
    *,
    order: Callable[[int, int], Sequence[int]] = lambda rivals, index: range(rivals),
    pace: Callable[[Load, Sequence[Cost]], Pace] = lambda load, costs: Pace(),
    second_opinions: Callable[[], None] | None = None,
    done: Callable[[int], None] = lambda position: None,
) -> list[Timing]:
    """Warm each call up as its timer runs it, then sample all in rounds until `rule` stops.

    The next block is enqueued while the last one runs, if the timer can, so that the device does not rest between
    blocks.

    Args:
        entries: the calls to time; inputs are built, graphs compiled, and each has run at least once.
        rule: when to stop: by the median of a single call, by the pairwise ratios of several.
        order: the order of the rivals in a round, from their number and the round's index.
        pace: called once, after the warm-up, with a function that loads the device, and each call's cost. It returns
            when to rest, and the least sampling time of a single call.
        second_opinions: called once, between `pace` and the first round, for blocks of other timers at the same clocks.
        done: called with the index of an entry whose block is done.

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
    longest_us, alone = max(cost.time_us for cost in costs), len(entries) == 1
    least_rounds = rule.least_rounds(longest_us)
    calls, untimed = min(costs[0].calls_in(ROUNDS_US / least_rounds), math.ceil(LEAST_SAMPLES / least_rounds)), 0
    if not alone:
        costs = _alike(entries, costs)
        # A call's place in its block is part of its time: in a block of one, every call is the first after the others.
        calls, untimed = min(cost.calls_in(RIVALS_ROUND_US) for cost in costs), 1
        # Rivals have a budget that is enough for their ratio.
        rule = replace(rule, patience_s=0.0)
    all_samples = [_Samples() for _ in entries]
    queue, at_load = _Queue(entries), max(calls, min(cost.calls_in(LOAD_US) for cost in costs))

    def load(seconds: float) -> float:
        found: list[list[float]] = [[] for _ in entries]
        since = time.perf_counter()
        while time.perf_counter() - since < seconds or not all(found):
            for position in range(len(entries)):
                for one in queue.put(position, at_load):
                    found[one.position] += one.block.times_us
        return sum(map(statistics.median, found))

    chosen = pace(load, costs)
    if not chosen.settled:
        rule = replace(rule, precision=0.0)
        for samples in all_samples:
            samples.flags.add("unsettled")
    if alone and chosen.least_s:
        # The clock swings: each round has blocks from the whole time. Rivals swing together, and their ratio stays.
        rule, calls = replace(rule, least_s=chosen.least_s, min_rounds=min(rule.min_rounds, LONG_CALL_ROUNDS)), at_load
    if second_opinions is not None:
        queue.drain()
        second_opinions()
        if chosen.least_s:
            load(_AGAIN_S)
    load_s = time.perf_counter() - entered
    # Seconds of rest in all, and since the last one.
    rested_s, burst_s = 0.0, math.inf

    def add(finished: list[_Done]) -> None:
        for one in finished:
            if one.number is not None:
                all_samples[one.position].add(one, untimed, costs[one.position].around_us)
                done(one.position)

    began, reason = time.perf_counter(), ""
    # A collection inside a block would be timed as part of a call.
    with without_collections():
        for index in itertools.count():
            for position in order(len(entries), index):
                if chosen.rest_s and (burst_s >= chosen.burst_s or not alone):
                    add(queue.drain())
                    time.sleep(chosen.rest_s)
                    rested_s, burst_s = rested_s + chosen.rest_s, 0.0
                since = time.perf_counter()
                add(queue.put(position, untimed + calls, index))
                burst_s += time.perf_counter() - since
            elapsed_s = time.perf_counter() - began - rested_s
            blocks = min(len(samples.blocks) for samples in all_samples)
            if alone and chosen.least_s:
                all_samples[0].strata = complete = min(_STRATA, blocks // 2)
            else:
                complete, rest = divmod(blocks, all_samples[0].joined)
                complete = 0 if rest else complete
            if complete < rule.least_rounds(longest_us) or elapsed_s < rule.least_s:
                continue
            medians = [samples.medians(complete) for samples in all_samples]
            about = statistics.median(all_samples[0].times_us) if alone else None
            reason = rule.verdict(_series(medians), longest_us, elapsed_s, about) or ""
            if reason:
                break
            if complete >= rule.max_rounds and not all_samples[0].strata:
                for samples in all_samples:
                    samples.joined *= 2
        add(queue.drain())
    return [
        Timing(
            timer=entry.timer.name,
            l2=entry.timer.l2,
            times_us=samples.times_us,
            rounds=samples.rounds,
            stop_reason=reason,
            notes={
                "calls_per_round": float(calls * samples.joined),
                "warm_up_calls": float(cost.warm_up_calls),
                "load_s": load_s,
            }
            | ({"flush_us": cost.around_us} if cost.around_us else {})
            | ({"duty": samples.duty()} if isinstance(entry.timer, Queueing) and alone else {})
            | {name: statistics.median(values) for name, values in samples.notes.items()},
            flags=tuple(sorted(samples.flags)),
            blocks=tuple(
                (samples.round_of(number), moment(begin), moment(end))
                for number, (begin, end) in enumerate(samples.spans)
            ),
        )
        for entry, samples, cost in zip(entries, all_samples, costs, strict=True)
    ]


@dataclass(frozen=True)
class _Done:
    """A block that is done: of which entry, when it ran, and its number; None for load."""

    position: int
    block: Block
    span: tuple[float, float]
    number: int | None


class _Queue:
    """Enqueues blocks, and waits for all but the newest."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._waiting: deque[tuple[int, Callable[[], Block], float, int | None]] = deque()
        self._ended = 0.0

    def put(self, position: int, calls: int, number: int | None = None) -> list[_Done]:
        """Enqueue a block of an entry; return those that are done. Raises RivalFailed if an entry raises."""
        entry = self._entries[position]
        with _naming(position, None if number is None else number + 1), entry.scope():
            if number is not None:
                entry.before_block(number)
            began = time.perf_counter()
            if isinstance(entry.timer, Queueing):
                last, finish = entry.timer.enqueue(entry.call, calls)
            else:
                block = entry.timer.block(entry.call, calls)
                last, block.last = block.last, None
                finish = partial(_itself, block)
            if number is not None:
                entry.after_block(number, last)
            del last
        self._waiting.append((position, finish, began, number))
        queues = isinstance(entry.timer, Queueing) and not getattr(entry.timer, "blocked", False)
        return self._finished(1 if queues else 0)

    def drain(self) -> list[_Done]:
        """Wait for all blocks, and return them."""
        return self._finished(0)

    def _finished(self, left: int) -> list[_Done]:
        finished = []
        while len(self._waiting) > left:
            position, finish, began, number = self._waiting.popleft()
            with _naming(position, None if number is None else number + 1):
                block = finish()
            began, self._ended = max(began, self._ended), time.perf_counter()
            finished.append(_Done(position, block, (began, self._ended), number))
        return finished


def _itself(block: Block) -> Block:
    return block


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


def _alike(entries: Sequence[Entry], costs: Sequence[Cost]) -> list[Cost]:
    """Let the samples of all rivals that are means of calls have equally many, and return what they cost then.

    It is as many as the shortest call needs, but no more than fill a round of the longest.
    """
    timers: list[Any] = [entry.timer for entry in entries]
    if not all(hasattr(timer, "loops") for timer in timers):
        return list(costs)
    a_call_us = [cost.time_us / timer.loops for cost, timer in zip(costs, timers, strict=True)]
    most = max(1, math.floor(RIVALS_ROUND_US / max(a_call_us)))
    loops = min(most, max(timer.loops for timer in timers))
    alike = [replace(cost, time_us=loops * us) for cost, us in zip(costs, a_call_us, strict=True)]
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
    return timing_of(timer.name, timer.l2, timer.block(call, calls))


def timing_of(timer: str, l2: str, block: Block) -> Timing:
    """Return one block as a timing."""
    return Timing(
        timer=timer,
        l2=l2,
        times_us=tuple(block.times_us),
        rounds=(0,) * len(block.times_us),
        stop_reason="one_block",
        notes=block.notes,
        flags=block.flags,
    )
