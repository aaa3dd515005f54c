"""Environments: what differs between two results besides the result, and whether they may be compared at all."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.results.result import Result

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


# With these the numbers measure other things, or other machines: refused, unless told otherwise (docs/comparing.md).
REFUSED = frozenset(
    {
        "device",
        "gpu",
        "power_limit_w",
        "method_version",
        "timer",
        "l2",
        "inputs",
        "gradients_enabled",
        "regime",
    }
)
# The same for jobs of the CPU, where the processor is what is measured.
REFUSED_ON_CPU = REFUSED | {"cpu", "cpu_threads"}
# Measured anew in each session: these say nothing of what was set up.
_NO_DIFFERENCE = frozenset({"event_floor_us", "event_quantum_us", "nvml"})
# Of values that differ within a sweep a report shows the first few.
_SHOWN = 4
_OF_MEASURING = ("timer", "regime", "seed")


@dataclass(frozen=True)
class Difference:
    """Something that differs between two sides, in so many cells; `refuses` if comparing them needs `anyway=true`."""

    name: str
    old: Any
    new: Any
    cells: int
    refuses: bool

    def __str__(self) -> str:
        return f"{self.name} {_word(self.old)} -> {_word(self.new)}"


def differences(pairs: Iterable[tuple[Result, Result]]) -> tuple[Difference, ...]:
    """What differs between the first and the second of each pair, counted over the pairs; what refuses comes first."""
    found: Counter[tuple[str, str, str, bool]] = Counter()
    values: dict[tuple[str, str, str, bool], tuple[Any, Any]] = {}
    alike: dict[tuple[int, int, int, int], list[tuple[str, Any, Any, bool]]] = {}
    for old, new in pairs:
        # Thousands of pairs have a handful of environments: those objects are shared, see `result.decode`.
        key = (id(old.environment), id(new.environment), id(old.measuring), id(new.measuring))
        if key not in alike:
            alike[key] = _between(old, new)
        here = list(alike[key])
        if old.l2 != new.l2 and old.l2 and new.l2:
            here.append(("l2", old.l2, new.l2, True))
        if old.method_version != new.method_version:
            here.append(("method_version", old.method_version, new.method_version, True))
        for name, one, other, refuses in here:
            known = (name, repr(one), repr(other), refuses)
            found[known] += 1
            values[known] = one, other
    listed = [Difference(key[0], *values[key], cells, key[3]) for key, cells in found.items()]
    return tuple(sorted(listed, key=lambda one: (not one.refuses, one.name, str(one.old), str(one.new))))


def facts(result: Result) -> dict[str, Any]:
    """What is known of where and how a result was measured, flat: `gpu`, `versions.torch`, `timer` ..."""
    found: dict[str, Any] = {"device": result.device}
    for name, value in result.environment.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            found[name] = value
    found |= {name: getattr(result.measuring, name) for name in _OF_MEASURING}
    return {name: value for name, value in found.items() if name not in _NO_DIFFERENCE}


def told(results: Iterable[Result]) -> tuple[tuple[str, str], ...]:
    """What is known of where and how results were measured, by name: the values in one text where there are several."""
    found: dict[str, dict[str, None]] = {}
    for result in {(id(result.environment), id(result.measuring)): result for result in results}.values():
        for name, value in facts(result).items():
            found.setdefault(name, {})[_word(value)] = None
    return tuple((name, _some(list(values))) for name, values in sorted(found.items()))


def _some(values: Sequence[str]) -> str:
    rest = len(values) - _SHOWN
    return " | ".join(values[:_SHOWN]) + (f" | ... and {rest} more" if rest > 0 else "")


def _between(old: Result, new: Result) -> list[tuple[str, Any, Any, bool]]:
    before, after = facts(old), facts(new)
    refused = REFUSED_ON_CPU if old.device == "cpu" else REFUSED
    if old.device != "cpu":
        # The host's processor issues the calls; where the GPU is what is measured it is worth a word, no more.
        before.pop("cpu_threads", None)
        after.pop("cpu_threads", None)
    return [
        # What one side does not know (a driver without NVML) is no proof that they are unlike.
        (name, before.get(name), after.get(name), name in refused and name in before and name in after)
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
