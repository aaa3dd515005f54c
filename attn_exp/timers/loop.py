"""The loop that all timers share: warm up, sample in rounds, stop by rule."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from attn_exp.record import Timing
from attn_exp.stats import log_half_width, round_medians

Call = Callable[[], Any]

WARM_UP_US = 25_000.0
WARM_UP_CALLS = (3, 300)
ROUND_US = 15_000.0
ROUND_CALLS = (1, 50)
# The launch queue holds about 1,024 kernels; a block that fills it stalls the host behind the blocker.
ROUND_KERNELS = 800
LONG_CALL_US = 50_000.0
LONG_CALL_ROUNDS = 5


@dataclass(frozen=True)
class Cost:
    """What one call costs in a timer's own pattern, in microseconds of wall time, and the kernels it launches."""

    time_us: float
    around_us: float = 0.0
    kernels: float = 1.0

    @property
    def calls_per_round(self) -> int:
        """As many calls as fill about 15 ms, within the launch queue."""
        wanted = math.ceil(ROUND_US / (self.time_us + self.around_us))
        queue = math.floor(ROUND_KERNELS / max(1.0, self.kernels))
        return max(ROUND_CALLS[0], min(ROUND_CALLS[1], wanted, queue))

    @property
    def warm_up_calls(self) -> int:
        """25 ms of calls, at least 3 and at most 300."""
        wanted = math.ceil(WARM_UP_US / (self.time_us + self.around_us))
        return max(WARM_UP_CALLS[0], min(WARM_UP_CALLS[1], wanted))


@dataclass
class Block:
    """One block of calls: a sample a call in microseconds, and what went wrong meanwhile."""

    times_us: list[float]
    flags: tuple[str, ...] = ()


class Timer(Protocol):
    """A way of timing. `name` and `l2` go into the record; `block` times `calls` calls in a row."""

    name: str
    l2: str

    def estimate(self, call: Call) -> Cost:
        """What one call costs, from a few calls."""
        ...

    def block(self, call: Call, calls: int) -> Block:
        """Time `calls` calls, one sample each."""
        ...


@dataclass(frozen=True)
class StoppingRule:
    """When enough rounds are sampled.

    `precise` once the 95 % interval over round log-medians lies within +-`precision`, after `min_rounds` rounds
    (fewer for calls above 50 ms); else `max_rounds`; else `budget` after `budget_s` seconds, but never before the
    least number of rounds.
    """

    precision: float
    min_rounds: int
    max_rounds: int
    budget_s: float

    def least_rounds(self, call_us: float) -> int:
        """The rounds below which no rule stops."""
        return min(self.min_rounds, LONG_CALL_ROUNDS) if call_us > LONG_CALL_US else self.min_rounds

    def verdict(self, medians_us: list[float], call_us: float, elapsed_s: float) -> str | None:
        """Why to stop after these rounds, or None to go on."""
        if len(medians_us) < self.least_rounds(call_us):
            return None
        half_width = log_half_width(medians_us)
        if half_width is not None and half_width <= self.precision:
            return "precise"
        if len(medians_us) >= self.max_rounds:
            return "max_rounds"
        return "budget" if elapsed_s >= self.budget_s else None


@dataclass
class _Samples:
    times_us: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)

    def add(self, block: Block, index: int) -> None:
        self.times_us += block.times_us
        self.rounds += [index] * len(block.times_us)
        self.flags.update(block.flags)


def sample(
    timer: Timer,
    call: Call,
    rule: StoppingRule,
    *,
    kernels: float = 1.0,
    amid: Callable[[], None] | None = None,
) -> Timing:
    """Warm `call` up in the timer's own pattern, then sample it in rounds until `rule` says stop.

    Args:
        timer: how to time.
        call: what to time; inputs built, graph compiled, run at least once.
        rule: when to stop.
        kernels: kernels that one call launches, where known; bounds the calls of a round.
        amid: called once, halfway through the least number of rounds: other timers' blocks, under the same clocks.
    """
    cost = timer.estimate(call)
    cost = Cost(cost.time_us, cost.around_us, max(cost.kernels, kernels))
    calls = cost.calls_per_round
    left = cost.warm_up_calls
    while left > 0:
        timer.block(call, min(left, calls))
        left -= calls
    samples, started = _Samples(), time.perf_counter()
    index, reason = 0, None
    with _without_collections():
        while reason is None:
            if amid is not None and index == rule.least_rounds(cost.time_us) // 2:
                paused = time.perf_counter()
                amid()
                started += time.perf_counter() - paused
            samples.add(timer.block(call, calls), index)
            index += 1
            medians = round_medians(samples.times_us, samples.rounds)
            reason = rule.verdict(medians, cost.time_us, time.perf_counter() - started)
    return Timing(
        timer=timer.name,
        l2=timer.l2,
        times_us=tuple(samples.times_us),
        rounds=tuple(samples.rounds),
        stop_reason=reason,
        notes={"calls_per_round": float(calls), "warm_up_calls": float(cost.warm_up_calls)},
        flags=tuple(sorted(samples.flags)),
    )


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector out: a collection inside a block is a pause of the host that no call made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def single_block(timer: Timer, call: Call, calls: int) -> Timing:
    """One block of a warmed-up call: a second opinion beside the timer that ranks."""
    block = timer.block(call, calls)
    return Timing(
        timer=timer.name,
        l2=timer.l2,
        times_us=tuple(block.times_us),
        rounds=(0,) * len(block.times_us),
        stop_reason="one_block",
        flags=block.flags,
    )
