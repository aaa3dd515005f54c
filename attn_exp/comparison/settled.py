"""Decisions of duels about rows of a sweep: pairs that were measured side by side need no second duel."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.comparison.join import machine, method_key
from attn_exp.core.errors import NOT_DECODED, UserError, is_inside
from attn_exp.core.files import SHORT_BYTES, read_whole
from attn_exp.core.record.file import VERDICTS_NAME
from attn_exp.core.record.request import DUEL_NAME
from attn_exp.core.source import short
from attn_exp.core.stats.paired import Verdict
from attn_exp.results.cell import Cell
from attn_exp.results.read import read_folder
from attn_exp.results.result import Result
from attn_exp.results.there import sweeps_in


class _Pair(msgspec.Struct, frozen=True):
    """One pair in `duel.json`; a bound that is infinite is null there."""

    a: str
    b: str
    effect: float
    low: float
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Settled:
    """The decision of a duel: how many times as fast as the other a row is, with its 95 % interval.

    `equal` says that both are equivalent; else the interval lies on one side of 1.
    """

    value: float
    low: float
    high: float
    equal: bool


def _read_duel(folder: Path, home: Path) -> Iterator[tuple[Result, Result, str, Settled | None]]:
    """Yield rivals a and b of the duel in a folder, their pass, and what it decided about a; nothing if it is none."""
    path = folder / VERDICTS_NAME
    if not (folder / DUEL_NAME).is_file() or not is_inside(path, home):
        return
    try:
        by_pass = msgspec.json.decode(read_whole(path, SHORT_BYTES), type=dict[str, list[_Pair]])
        # A rival's folder begins with its letter, as its label does.
        rivals = {result.job.partition("-")[0]: result for result in read_folder(folder).results}
    except (OSError, UserError, *NOT_DECODED):
        return
    for direction, pair in ((direction, pair) for direction, pairs in by_pass.items() for pair in pairs):
        a, b = rivals.get(pair.a[:1]), rivals.get(pair.b[:1])
        if a and b and pair.high is not None and -1 < pair.low <= pair.effect <= pair.high:
            found = Settled(1 + pair.effect, 1 + pair.low, 1 + pair.high, pair.verdict == "equivalent")
            yield a, b, direction, None if pair.verdict == "undecided" else found


class Settlements:
    """The pairs that duels in some folders of sweeps decided.

    Of several duels of one pair the latest counts, also if it decided nothing.
    """

    def __init__(self, homes: Iterable[Path] = ()) -> None:
        self._pairs: dict[Any, Settled | None] = {}
        found = [one for home in homes for folder in sweeps_in(home) for one in _read_duel(folder, home)]
        for a, b, direction, one in sorted(found, key=lambda decision: decision[0].finished_at):
            other = one and Settled(1 / one.value, 1 / one.high, 1 / one.low, one.equal)
            self._pairs[_side(a), _side(b), direction] = one
            self._pairs[_side(b), _side(a), direction] = other

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
