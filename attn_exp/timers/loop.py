"""The sampling loop of all timers: warm up, then sample rivals in turns, a block each a round, until a rule says stop.

The time is read in a timer's `block`: on a GPU CUDA events (event.py), on a CPU `perf_counter_ns` (cpu.py).
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from attn_exp.core.host.energy import moment
from attn_exp.core.host.process import without_collections
from attn_exp.core.record.record import Timing
from attn_exp.core.stats.interval import log_half_width
from attn_exp.core.stats.paired import VERDICT_LEVEL, abba_order, paired_by_round
from attn_exp.timers.call import Call
from attn_exp.timers.card import COUNTED, LONG_CALL_US, Card
from attn_exp.timers.gpu import Span
from attn_exp.timers.stopping import LONG_CALL_ROUNDS, StoppingRule

WARM_UP_US = 15_000.0
WARM_UP_CALLS = (3, 150)
# A block of a rival's own calls; the first one of each block is not timed, since it follows another rival's.
BLOCK_US = 15_000.0
BLOCK_CALLS = (1, 50)
# The launch queue holds about 1,024 kernels; a block that fills it stalls the host behind the blocker.
BLOCK_KERNELS = 800
# So many blocks of the highest clocks do not tell it.
_OUTLIERS = 2
# How often a block is repeated whose clock is below its call's highest.
REPEATS = 2
# After so many rounds a rival leaves that takes so many times as long as the fastest.
SLOW_ROUNDS, SLOW = 5, 20.0
# A rival whose ratio is off by more than this is decided, from so many rounds on, at a level that the last round, which
# follows, hardly raises above a verdict's.
_DECIDED, DECIDED_ROUNDS, _DECIDED_LEVEL = 0.005, 5, VERDICT_LEVEL / 4
# A stretch of `regime=sustained`: seconds of load before it and in it, and its blocks; below this share of time in
# which calls and flushes ran it is repeated once.
LEAD_S, STRETCH_S, STRETCH_BLOCK_US, STRETCH_CALLS, DUTY = 0.5, 1.0, 50_000.0, 200, 0.95
# Rounds of the rule for each stretch, of which there are two at least.
_ROUNDS_A_STRETCH = 10


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

    def calls_in(self, block_us: float, most: int = BLOCK_CALLS[1]) -> int:
        """Return the number of calls that takes nearest to `block_us` and fits the launch queue."""
        wanted = round(block_us / (self.time_us + self.around_us))
        queue = math.floor(BLOCK_KERNELS / max(1.0, self.kernels))
        return max(BLOCK_CALLS[0], min(most, wanted, queue))

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
        repeated_us: the time of calls that were measured again because the host was late, without its gaps.
        span: the GPU's clock while the calls ran; None if the timer does not stamp its blocks.
    """

    times_us: list[float]
    flags: tuple[str, ...] = ()
    notes: dict[str, float] = field(default_factory=dict)
    last: Any = None
    repeated_us: float = 0.0
    span: Span | None = None


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

    def enqueue(self, call: Call, calls: int) -> Callable[[], Block]:
        """Enqueue a block; return what waits for it."""
        ...


@dataclass(frozen=True)
class Entry:
    """A call to sample.

    Attributes:
        timer: its timer.
        call: the call to time.
        scope: the context manager that blocks are enqueued in.
        kernels: how many kernels a call launches, which limits the calls of a block.
        after_block: called with a block's round and its last call's result.
    """

    timer: Timer
    call: Call
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    kernels: float = 1.0
    after_block: Callable[[int, Any], None] = lambda number, last: None


@dataclass(frozen=True)
class _Sampled:
    """A block in a round: its samples, when the host waited for it, and the GPU's mean clock, None if unknown."""

    number: int
    times_us: list[float]
    host: tuple[float, float]
    clock_mhz: float | None


@dataclass
class _Rival:
    """An entry in its turns: its cost, and what was sampled. `left` says why it takes no more turns."""

    entry: Entry
    cost: Cost
    blocks: list[_Sampled] = field(default_factory=list)
    duties: list[float] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    notes: dict[str, list[float]] = field(default_factory=dict)
    # The clock below which no block counts.
    least_mhz: float = 0.0
    left: str = ""
    failed: bool = False

    @property
    def long(self) -> bool:
        """Whether a call fills a block alone, which then has no call that is not timed."""
        return self.cost.time_us > LONG_CALL_US

    @property
    def calls(self) -> int:
        """The timed calls of a block."""
        return self.cost.calls_in(BLOCK_US)

    def add(self, number: int, block: Block, host: tuple[float, float], untimed: int = 0) -> None:
        """Add a block without its first `untimed` samples."""
        clock_mhz = None if block.span is None else round(block.span.clock_mhz, 1)
        self.blocks.append(_Sampled(number, block.times_us[untimed:], host, clock_mhz))
        self.flags.update(block.flags)
        for name, value in block.notes.items():
            self.notes.setdefault(name, []).append(value)

    def highest_mhz(self) -> float:
        """Return the third-highest clock of the blocks: one in which the GPU waited may show more than the call has."""
        clocks = sorted((block.clock_mhz or 0.0 for block in self.blocks), reverse=True)
        return clocks[min(_OUTLIERS, len(clocks) - 1)]

    def counts(self, block: _Sampled) -> bool:
        """Return whether a block was at the call's clock, as far as that is known by now."""
        return block.clock_mhz is None or block.clock_mhz >= self.least_mhz

    def counted(self) -> list[_Sampled]:
        """Return the blocks that count."""
        return [block for block in self.blocks if self.counts(block)]

    def medians(self) -> dict[int, float]:
        """Return the median of each round by its number."""
        return {block.number: statistics.median(block.times_us) for block in self.counted()}

    def median(self) -> float:
        """Return the median of all samples that count."""
        return statistics.median(itertools.chain.from_iterable(block.times_us for block in self.counted()))

    def half(self) -> float:
        """Return the half-width of the interval of the row itself."""
        half = log_half_width(list(self.medians().values()), self.median())
        return math.inf if half is None else half

    def timing(self) -> Timing | None:
        """Return what was sampled; None after a failure, or without a sample."""
        if self.failed or not self.blocks:
            return None
        timer, counted = self.entry.timer, self.counted()
        clocks = [block.clock_mhz for block in counted if block.clock_mhz is not None]
        return Timing(
            timer=timer.name,
            l2=timer.l2,
            times_us=tuple(itertools.chain.from_iterable(block.times_us for block in counted)),
            rounds=tuple(block.number for block in counted for _ in block.times_us),
            stop_reason=self.left,
            notes={"calls_per_round": float(self.calls), "warm_up_calls": float(self.cost.warm_up_calls)}
            | ({"flush_us": self.cost.around_us} if self.cost.around_us else {})
            | ({"duty": min(self.duties)} if self.duties else {})
            | {name: statistics.median(values) for name, values in self.notes.items()},
            flags=tuple(sorted(self.flags)),
            blocks=tuple((block.number, moment(block.host[0]), moment(block.host[1])) for block in counted),
            clocks_mhz=tuple(clocks) if len(clocks) == len(counted) else (),
            uncounted=tuple(
                (block.clock_mhz or 0.0, tuple(block.times_us)) for block in self.blocks if not self.counts(block)
            ),
        )


def sample(timer: Timer, call: Call, rule: StoppingRule, *, kernels: float = 1.0, **options: Any) -> Timing:
    """Sample one call; `options` are those of `sample_turns`. Raises what the call raises."""
    (timing,) = sample_turns([Entry(timer, call, kernels=kernels)], rule, **options)
    assert timing is not None
    return timing


def _raise(position: int, error: Exception, number: int | None) -> None:
    raise error


def sample_turns(
    entries: Sequence[Entry],
    rule: StoppingRule,
    *,
    card: Card | None = None,
    sustained: bool = False,
    before_round: Callable[[int, bool], None] = lambda number, last: None,
    done: Callable[[], None] = lambda: None,
    failed: Callable[[int, Exception, int | None], None] = _raise,
) -> list[Timing | None]:
    """Warm each call up as its timer runs it, then sample all in turns until `rule` stops.

    Args:
        entries: the calls to time; inputs are built, graphs compiled, and each has run at least once.
        rule: when to stop: by the ratios to the fastest, and by the median of that.
        card: the GPU's clock; None on a CPU, and where the clock does not matter.
        sustained: whether each rival runs alone under load, in stretches that take turns.
        before_round: called before a round with its number, and whether it is the last one.
        done: called after each block.
        failed: called with the index of an entry that raised, its exception, and the round from 0 on, or None before
            the first. The entry leaves, and the others go on, unless it raises.

    Returns:
        A timing for each entry, None if it failed. Samples of different entries with the same round were interleaved.
    """
    turns = _Turns(rule, card, before_round, done, failed)
    # A collection inside a block would be timed as part of a call.
    with without_collections():
        turns.warm_up(entries)
        if sustained and card is not None:
            turns.stretches()
        else:
            turns.rounds()
    return [None if rival is None else rival.timing() for rival in turns.rivals]


class _Turns:
    def __init__(
        self,
        rule: StoppingRule,
        card: Card | None,
        before_round: Callable[[int, bool], None],
        done: Callable[[], None],
        failed: Callable[[int, Exception, int | None], None],
    ) -> None:
        self.rivals: list[_Rival | None] = []
        self._rule, self._card = rule, card
        self._before_round, self._done, self._failed = before_round, done, failed
        self._began = 0.0

    def warm_up(self, entries: Sequence[Entry]) -> None:
        """Estimate what each call costs, and make it until it is warm."""
        for position, entry in enumerate(entries):
            self.rivals.append(None)
            try:
                self.rivals[position] = _Rival(entry, _warmed_up(entry))
            except Exception as error:  # any exception belongs to its entry
                self._failed(position, error, None)

    def rounds(self) -> None:
        """Sample rounds of a block each until the rule stops, then one more round of all."""
        self._began = time.perf_counter()
        for number in itertools.count():
            standing = self._standing()
            if not standing:
                break
            self._before_round(number, False)
            self._round(number, standing)
            self._look()
        # Whoever computes otherwise after a while is found: these blocks are always checked.
        if whole := [at for at, rival in enumerate(self.rivals) if rival is not None and not rival.failed]:
            self._before_round(number, True)
            self._round(number, whole)
        for rival in self._all():
            if len(rival.medians()) < max(2, len({block.number for block in rival.blocks}) // 2):
                # The card does not keep the clock that it once had: what it has counts, and is marked.
                rival.flags.add("below_clock")
                rival.least_mhz = 0.0

    def stretches(self) -> None:
        """Sample each rival alone under load, in stretches that take turns."""
        count = max(2, self._rule.min_rounds // _ROUNDS_A_STRETCH)
        for number in range(count):
            standing = self._standing()
            if not standing:
                break
            self._before_round(number, number == count - 1)
            for place in abba_order(len(standing), number):
                self._turn(standing[place], number, self._stretch)
        for rival in self._all():
            rival.left = rival.left or "stretches"

    def _all(self) -> list[_Rival]:
        return [rival for rival in self.rivals if rival is not None]

    def _standing(self) -> list[int]:
        return [at for at, rival in enumerate(self.rivals) if rival is not None and not rival.left]

    def _round(self, number: int, standing: Sequence[int]) -> None:
        for place in abba_order(len(standing), number):
            self._turn(standing[place], number, self._block)

    def _turn(self, position: int, number: int, sample: Callable[[_Rival, int], None]) -> None:
        rival = self.rivals[position]
        assert rival is not None
        try:
            with rival.entry.scope():
                sample(rival, number)
        except Exception as error:  # any exception belongs to its entry
            rival.failed, rival.left = True, "failed"
            self._failed(position, error, number)
        self._done()

    def _block(self, rival: _Rival, number: int) -> None:
        """Sample a block of a round; on a GPU again if its clock is below the call's highest, after a rest."""
        entry, card, untimed = rival.entry, self._card, 0 if rival.long else 1
        for attempt in itertools.count():
            if card is not None:
                card.rest(rival.cost.time_us)
            began = time.perf_counter()
            block = entry.timer.block(entry.call, untimed + rival.calls)
            last, block.last = block.last, None
            ended, span = time.perf_counter(), block.span
            rival.add(number, block, (began, ended), untimed)
            if card is None or span is None or rival.long or not card.sound(span.clock_mhz):
                break
            rival.least_mhz = COUNTED * rival.highest_mhz()
            counts = rival.counts(rival.blocks[-1])
            card.adapt(counts)
            if counts or attempt == REPEATS:
                break
            last = None
        if card is not None:
            card.give_up()
        entry.after_block(number, last)

    def _look(self) -> None:
        """Let rivals leave that are slow, decided or precise, or out of rounds or time; the fastest is the last."""
        standing = [rival for rival in self._all() if not rival.left]
        if not standing:
            return
        fastest = min((rival for rival in self._all() if not rival.failed), key=_Rival.median)
        least = self._rule.least_rounds(fastest.median())
        for rival in standing:
            if rival is not fastest:
                rival.left = self._verdict(rival, fastest, least)
        others = [rival for rival in standing if rival is not fastest and not rival.left]
        if fastest.left or others:
            return
        half = fastest.half() if len(fastest.medians()) >= least else math.inf
        fastest.left = "precise" if half <= self._rule.precision else self._over(fastest, half)

    def _verdict(self, rival: _Rival, fastest: _Rival, least: int) -> str:
        """Return why a rival leaves, or nothing."""
        rounds = len(rival.medians())
        if rounds >= SLOW_ROUNDS and rival.median() > SLOW * fastest.median():
            return "slow"
        if rounds < min(least, DECIDED_ROUNDS):
            return self._over(rival, math.inf)
        ratio = paired_by_round(rival.medians(), fastest.medians())
        own = rival.half()
        if own <= self._rule.stable and ratio is not None:
            if ratio.log_ratio - ratio.half > _DECIDED and ratio.p <= _DECIDED_LEVEL:
                return "decided"
            if ratio.half <= self._rule.precision and rounds >= least:
                return "precise"
        enough = rounds >= least and ratio is not None
        return self._over(rival, max(own, ratio.half) if enough and ratio is not None else math.inf)

    def _over(self, rival: _Rival, half: float) -> str:
        """Return why a rival leaves that is not precise: rounds or time are over."""
        rounds = rival.blocks[-1].number + 1
        spent_s = sum(end - begin for begin, end in (block.host for block in rival.blocks))
        late = time.perf_counter() - self._began > self._rule.limit_s(len(self._all()))
        return self._rule.over(rounds, spent_s, half, late=late and rounds >= LONG_CALL_ROUNDS)

    def _stretch(self, rival: _Rival, number: int) -> None:
        """Sample a stretch; one in which the GPU rested is repeated once."""
        entry = rival.entry
        calls = rival.cost.calls_in(STRETCH_BLOCK_US, STRETCH_CALLS)
        block_us = calls * (rival.cost.time_us + rival.cost.around_us)
        lead, counted = (max(1, math.ceil(seconds * 1e6 / block_us)) for seconds in (LEAD_S, STRETCH_S))
        numbers = [None] * lead + [number * _BLOCKS + min(at, _BLOCKS - 1) for at in range(counted)]
        for attempt in range(2):
            found = list(_in_a_row(entry, calls, len(numbers)))
            newest = found[-1][0]
            last, newest.last = newest.last, None
            spans = [block.span for block, _ in found[lead:] if block.span is not None]
            duty = 1.0
            if spans:
                busy_us = sum(
                    sum(block.times_us) + block.repeated_us + rival.cost.around_us * len(block.times_us)
                    for block, _ in found[lead:]
                )
                duty = min(1.0, busy_us / 1e6 / (spans[-1].end_s - spans[0].begin_s))
            if duty >= DUTY or attempt:
                break
        rival.duties.append(duty)
        for index, (block, host) in zip(numbers, found, strict=True):
            if index is not None:
                rival.add(index, block, host)
        entry.after_block(number, last)


# The rounds of a stretch, by which rivals are paired: its blocks of 50 ms.
_BLOCKS = math.ceil(STRETCH_S * 1e6 / STRETCH_BLOCK_US)


def _in_a_row(entry: Entry, calls: int, count: int) -> Iterator[tuple[Block, tuple[float, float]]]:
    """Yield so many blocks with the host's time, the next one enqueued while one runs.

    The last one has its last call's result.
    """
    waiting: list[Callable[[], Block]] = []
    began = time.perf_counter()
    for at in range(count):
        if at < count - 1 and isinstance(entry.timer, Queueing):
            waiting.append(entry.timer.enqueue(entry.call, calls))
        else:
            block = entry.timer.block(entry.call, calls)
            block.last = block.last if at == count - 1 else None
            waiting.append(partial(_itself, block))
        while len(waiting) > (at < count - 1):
            block = waiting.pop(0)()
            ended = time.perf_counter()
            yield block, (began, ended)
            began = ended


def _itself(block: Block) -> Block:
    return block


def _warmed_up(entry: Entry) -> Cost:
    with entry.scope():
        cost = entry.timer.estimate(entry.call)
        cost = replace(cost, kernels=max(cost.kernels, entry.kernels))
        left, at_once = cost.warm_up_calls, cost.calls_in(BLOCK_US)
        while left > 0:
            entry.timer.block(entry.call, min(left, at_once))
            left -= at_once
    return cost


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
