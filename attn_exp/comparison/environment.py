"""Environments: how two results differ in hardware, software and method, and whether they are comparable."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.core.errors import UserError
from attn_exp.core.source import short
from attn_exp.results.result import Result

# Differences that make numbers incomparable: refused unless anyway=true (docs/comparing.md).
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
        "accumulate",
    }
)
# CPU jobs measure the processor itself.
REFUSED_ON_CPU = REFUSED | {"cpu", "cpu_threads"}
# These are measured anew in each session and do not describe a setup.
_NO_DIFFERENCE = frozenset({"event_floor_us", "event_quantum_us", "nvml"})
# How many of a sweep's differing values a report lists.
_SHOWN = 4
_OF_MEASURING = ("timer", "regime", "seed", "accumulate")


@dataclass(frozen=True)
class Difference:
    """A difference between two environments in so many cells; `refuses` if it requires `anyway=true`."""

    name: str
    old: Any
    new: Any
    cells: int
    refuses: bool

    def __str__(self) -> str:
        return f"{self.name} {_word(self.old)} -> {_word(self.new)}"


def differences(pairs: Iterable[tuple[Result, Result]]) -> tuple[Difference, ...]:
    """Return the differences between the results of each pair, with their counts, the refused ones first."""
    counts: Counter[tuple[str, str, str, bool]] = Counter()
    values: dict[tuple[str, str, str, bool], tuple[Any, Any]] = {}
    alike: dict[tuple[int, int, int, int], list[tuple[str, Any, Any, bool]]] = {}
    for old, new in pairs:
        # Thousands of pairs share a few environment objects; see `result.decode`.
        key = (id(old.environment), id(new.environment), id(old.measuring), id(new.measuring))
        if key not in alike:
            alike[key] = _between(old, new)
        here = list(alike[key])
        if old.l2 != new.l2 and old.l2 and new.l2:
            here.append(("l2", old.l2, new.l2, True))
        if old.method_version != new.method_version:
            here.append(("method_version", old.method_version, new.method_version, True))
        if short(old.source) != short(new.source):
            here.append(
                (f"source of {new.backend['name']}", short(old.source) or None, short(new.source) or None, False)
            )
        for name, one, other, refuses in here:
            known = (name, repr(one), repr(other), refuses)
            counts[known] += 1
            values[known] = one, other
    listed = [Difference(key[0], *values[key], cells, key[3]) for key, cells in counts.items()]
    return tuple(sorted(listed, key=lambda one: (not one.refuses, one.name, str(one.old), str(one.new))))


def incomparable(found: Iterable[Difference], what: str, *, anyway: bool) -> list[Difference]:
    """Return the differences that make numbers incomparable. Raises UserError if there are some, unless `anyway`."""
    unlike = [difference for difference in found if difference.refuses]
    if unlike and not anyway:
        raise UserError(
            f"{what} cannot be compared ({'; '.join(dict.fromkeys(map(str, unlike)))}): "
            "choose cells with where=, or type anyway=true to compare them nevertheless"
        )
    return unlike


def facts(result: Result) -> dict[str, Any]:
    """Return everything known about where and how a result was measured: `gpu`, `versions.torch`, `timer` ..."""
    known: dict[str, Any] = {"device": result.device}
    for name, value in result.environment.items():
        if isinstance(value, Mapping):
            known |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            known[name] = value
    known |= {name: getattr(result.measuring, name) for name in _OF_MEASURING}
    return {name: value for name, value in known.items() if name not in _NO_DIFFERENCE}


def environment_summary(results: Iterable[Result]) -> dict[str, str]:
    """Return what is known about where and how results were measured, several values of a name joined."""
    values_by_name: dict[str, dict[str, None]] = {}
    for result in {(id(result.environment), id(result.measuring)): result for result in results}.values():
        for name, value in facts(result).items():
            values_by_name.setdefault(name, {})[_word(value)] = None
    return {name: _some(list(values)) for name, values in sorted(values_by_name.items())}


def _some(values: Sequence[str]) -> str:
    rest = len(values) - _SHOWN
    return " | ".join(values[:_SHOWN]) + (f" | ... and {rest} more" if rest > 0 else "")


def _between(old: Result, new: Result) -> list[tuple[str, Any, Any, bool]]:
    before, after = facts(old), facts(new)
    refused = REFUSED_ON_CPU if old.device == "cpu" else REFUSED
    if old.device != "cpu":
        # The host's processor only issues the calls, so its threads do not matter where the GPU is measured.
        before.pop("cpu_threads", None)
        after.pop("cpu_threads", None)
    return [
        # A value that one side lacks (a driver without NVML) does not prove a difference.
        (name, before.get(name), after.get(name), name in refused and name in before and name in after)
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
