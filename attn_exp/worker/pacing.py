"""Which calls the power limit may hold back, and the pace at which they are sampled."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from attn_exp.core.record.metrics import attention_work
from attn_exp.timers.loop import Cost
from attn_exp.timers.pace import BURST_S, SWING_S, Load, Pace, settled
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.machine.device import Machine

# A share of the measured matrix product's rate, with the flush counted: the power limit may hold back calls above it.
_HEAVY = 0.35
# From this length on an energy is known, for which a call is sampled as long as a heavy one.
_LONG_US = 1_000.0
# After a rest of so many seconds the GPU is at its highest clock, and stays there for `BURST_S`.
REST_S = 0.3
# After so many seconds the clock of a heavy call is no longer that of the next one.
_COLD_S = 1.0


def pacing(attempts: Sequence[Attempt], machine: Machine, direction: str) -> Callable[[Load, Sequence[Cost]], Pace]:
    """Return what chooses the pace of a pass of these rivals, from the load and each one's cost.

    Whether a call is heavy follows from its work and its time on the GPU.
    """

    def choose(load: Load, costs: Sequence[Cost]) -> Pace:
        measuring = attempts[0].request.measuring
        heavy = any(is_heavy(attempt, direction, cost) for attempt, cost in zip(attempts, costs, strict=True))
        long = max(cost.time_us for cost in costs) >= _LONG_US
        if machine.gpu is None or not (heavy or long):
            return Pace()
        if measuring.regime == "burst":
            return Pace(rest_s=REST_S, burst_s=BURST_S)
        with attempts[0].stage("settling"):
            was_loaded = time.perf_counter() - machine.heavy_until < _COLD_S
            chosen = settled(load, measuring.settle_s, was_loaded=was_loaded, draws=machine.power_share)
        # The energy of a long call needs as long a window as its clock.
        return replace(chosen, least_s=SWING_S) if long and chosen.settled and measuring.settle_s else chosen

    return choose


def is_heavy(attempt: Attempt, direction: str, cost: Cost) -> bool:
    """Whether calls back to back, with their flushes, reach so much of the matrix product's rate that power may cap."""
    ceiling = attempt.ceilings.get("matmul_flops_per_s")
    if not ceiling:
        return True
    work = attempt.passes[direction].work or attention_work(
        attempt.request.case, direction, saves_lse=attempt.with_gradients
    )
    return work.flops / ((cost.time_us + cost.around_us) / 1e6) >= _HEAVY * ceiling
