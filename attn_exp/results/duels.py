"""Verdicts of duels, read with the records of their rivals: what they decided about pairs that a sweep leaves open."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attn_exp.core.errors import NOT_DECODED, UserError, is_inside
from attn_exp.core.files import SHORT_BYTES, read_whole
from attn_exp.core.record.file import VERDICTS_NAME
from attn_exp.core.record.request import DUEL_NAME
from attn_exp.core.stats.paired import Verdict
from attn_exp.results.read import read_folder
from attn_exp.results.result import Result
from attn_exp.results.there import sweeps_in


@dataclass(frozen=True, slots=True)
class Duelled:
    """The result of a duel between rivals `a` and `b` in one pass.

    `times` is how many times as fast as b a is, with its 95 % interval `low` to `high`; the `verdict` is about a.
    `duel` is the name of its folder.
    """

    a: Result
    b: Result
    direction: str
    verdict: Verdict
    times: float
    low: float
    high: float
    duel: str


class _Pair(msgspec.Struct, frozen=True):
    """One pair in `duel.json`; a bound that is infinite is null there."""

    a: str
    b: str
    effect: float
    low: float
    high: float | None
    verdict: Verdict


def read_duels(homes: Iterable[Path]) -> list[Duelled]:
    """Return what the duels in some folders of sweeps found, the oldest first. Files that are no duels are left out."""
    found = [one for home in homes for folder in sweeps_in(home) for one in _read_duel(folder, home)]
    return sorted(found, key=lambda one: one.a.finished_at)


def _read_duel(folder: Path, home: Path) -> list[Duelled]:
    path = folder / VERDICTS_NAME
    if not (folder / DUEL_NAME).is_file() or not is_inside(path, home):
        return []
    try:
        by_pass = msgspec.json.decode(read_whole(path, SHORT_BYTES), type=dict[str, list[_Pair]])
        # A rival's folder begins with its letter, as its label does.
        rivals = {result.job.partition("-")[0]: result for result in read_folder(folder).results}
    except (OSError, UserError, *NOT_DECODED):
        return []
    return [
        Duelled(a, b, direction, pair.verdict, 1 + pair.effect, 1 + pair.low, 1 + pair.high, folder.name)
        for direction, pairs in by_pass.items()
        for pair in pairs
        if (a := rivals.get(pair.a[:1])) is not None and (b := rivals.get(pair.b[:1])) is not None
        if pair.high is not None and -1 < pair.low <= pair.effect <= pair.high
    ]
