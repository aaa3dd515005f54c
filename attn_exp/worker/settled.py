"""What `regime=sustained` means for a pass: the load under which the GPU's clock settles before it is sampled."""

from collections.abc import Callable, Sequence

from attn_exp.core.metrics import attention_work
from attn_exp.timers.loop import Cost
from attn_exp.timers.settle import Load, Settling
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.machine.device import Machine

# Of the measured matrix product's rate, with the time around calls counted. On an H200 (results/h200/sdpa_sweep) no
# call below 0.6 was held back by the power limit.
_HEAVY = 0.5


def settling(
    attempts: Sequence[Attempt], machine: Machine, direction: str
) -> Callable[[Load, Sequence[Cost]], float | None] | None:
    """Return what loads the GPU before a pass of these rivals is sampled; None if nothing has to.

    It takes the load and each rival's cost, and returns what `Settling.settle` does.
    """
    measuring = attempts[0].request.measuring
    if machine.gpu is None or measuring.regime != "sustained":
        return None

    def settle(load: Load, costs: Sequence[Cost]) -> float | None:
        heavy = any(_share(attempt, direction, cost) >= _HEAVY for attempt, cost in zip(attempts, costs, strict=True))
        highest = machine.environment.get("max_sm_clock_mhz")
        with attempts[0].stage("settling"):
            return Settling(measuring.settle_s, heavy, machine.reading, highest).settle(load)

    return settle


def _share(attempt: Attempt, direction: str, cost: Cost) -> float:
    """Return the share of the measured matrix product's rate that calls back to back reach; 1 if it is not known."""
    ceiling = attempt.ceilings.get("matmul_flops_per_s")
    if not ceiling:
        return 1.0
    work = attempt.passes[direction].work or attention_work(
        attempt.request.case, direction, saves_lse=attempt.with_gradients
    )
    return work.flops / ((cost.time_us + cost.around_us) / 1e6) / ceiling
