"""Decisions of duels about rows of a sweep: pairs that were measured side by side need no second duel."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.comparison.join import machine, method_key
from attn_exp.core.source import short
from attn_exp.results.cell import Cell
from attn_exp.results.duels import Duelled
from attn_exp.results.result import Result


@dataclass(frozen=True, slots=True)
class Settled:
    """The decision of a duel: how many times as fast as the other a row is, with its 95 % interval.

    `equal` says that both are equivalent; else the interval lies on one side of 1. `duel` is the name of its folder.
    """

    value: float
    low: float
    high: float
    equal: bool
    duel: str


class Settlements:
    """The pairs that duels decided; of several duels of one pair the latest counts, also if it decided nothing."""

    def __init__(self, duels: Iterable[Duelled] = ()) -> None:
        self._pairs: dict[Any, Settled | None] = {}
        for one in duels:
            equal, decided = one.verdict == "equivalent", one.verdict != "undecided"
            for (a, b), times, low, high in (
                ((one.a, one.b), one.times, one.low, one.high),
                ((one.b, one.a), 1 / one.times, 1 / one.high, 1 / one.low),
            ):
                found = Settled(times, low, high, equal, one.duel) if decided else None
                self._pairs[_side(a), _side(b), one.direction] = found

    def __bool__(self) -> bool:
        """Whether there was any duel."""
        return bool(self._pairs)

    def over(self, cell: Cell, other: Cell) -> Settled | None:
        """Return what a duel decided about a cell and another of its case and pass, None if none did."""
        if machine(cell.result) is None or machine(other.result) is None:
            return None
        return self._pairs.get((_side(cell.result), _side(other.result), cell.direction))

    def left(self, rivals: Sequence[list[Cell]]) -> list[list[Cell]]:
        """Return the rivals that no duel found slower than another of them; all, if duels contradict each other.

        A rival is a cell, or several names of one kernel, which stand or fall together.
        """

        def beaten(rival: list[Cell]) -> bool:
            others = [other for each in rivals if each is not rival for other in each]
            over = (self.over(cell, other) for cell in rival for other in others)
            return any(one is not None and not one.equal and one.value < 1 for one in over)

        return [rival for rival in rivals if not beaten(rival)] or list(rivals)


def _side(result: Result) -> tuple[Any, ...]:
    """Return what a duel and a sweep have to share of each row: backend, case, method, machine and versions."""
    environment = result.environment
    versions = tuple(sorted((name, str(value)) for name, value in dict(environment.get("versions", {})).items()))
    software = (versions, *(environment.get(name) for name in ("driver", "cuda", "cudnn")))
    return (result.key, method_key(result), machine(result), short(result.source), software)
