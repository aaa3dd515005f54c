"""Canaries: fixed work that every worker times, so that two sessions can be told from two implementations.

Which canary stands for a cell depends on what holds the cell back. On a GPU a cell nearer to the matrix units' ceiling
follows the clock that the power cap leaves under load, as do the matrix product and the fixed SDPA; one nearer to the
memory's ceiling follows the copy; one far from both (below a tenth) is a chain of latencies at the unloaded clock, as
is the sleep. On a CPU whatever slows the machine slows all of them alike.
"""

import math
from dataclasses import dataclass

from attn_exp.compare.result import Result

_FAR_FROM_BOTH = 0.1
_MOST_SCATTER = 0.05
_STANDS_FOR = {
    "compute": ("matmul", "sdpa"),
    "memory": ("copy",),
    "latency": ("sleep",),
}


@dataclass(frozen=True, slots=True)
class Session:
    """What lies between two sessions by the canaries that stand for a cell.

    `factor` is how many times as long they took in the new session (geometric mean), `scatter` the largest relative
    difference of one of them from that, 0 for a single one.
    """

    names: tuple[str, ...]
    factor: float
    scatter: float


def session(old: Result, new: Result, direction: str) -> Session | None:
    """What to divide a cell's time in the new session by; None if no canary that stands for it was measured in both.

    None on a CPU: its canaries, a few milliseconds once a worker, were seen to move by 70 % where equal cells moved by
    12 % the other way. None too where canaries of one kind disagree: then they do not measure the session.
    """
    if new.device == "cpu" or old.device == "cpu":
        return None
    names = tuple(
        name
        for name in _STANDS_FOR[held_back_by(old, direction)]
        if old.canaries.get(name, 0) > 0 and new.canaries.get(name, 0) > 0
    )
    if not names:
        return None
    logs = [math.log(new.canaries[name] / old.canaries[name]) for name in names]
    mean = math.fsum(logs) / len(logs)
    scatter = math.expm1(max(abs(log - mean) for log in logs))
    return Session(names, math.exp(mean), scatter) if scatter <= _MOST_SCATTER else None


def held_back_by(result: Result, direction: str) -> str:
    """What limits a cell on a GPU: `compute`, `memory` or `latency`."""
    flops = result.metrics.get(f"{direction}/flops_of_measured", 0.0)
    moved = result.metrics.get(f"{direction}/bandwidth_of_measured", 0.0)
    if max(flops, moved) < _FAR_FROM_BOTH:
        return "latency"
    return "compute" if flops >= moved else "memory"
