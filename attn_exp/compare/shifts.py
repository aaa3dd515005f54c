"""Shifts: where in a series of values its level changes. Standard library alone.

Binary segmentation (Scott and Knott, Biometrics 30, 507, 1974; consistent for several changes: Vostrikova, Soviet
Mathematics Doklady 24, 55, 1981): the split with the largest two-sample t statistic is tested, and if it holds both
parts are searched in turn. The test is of the largest of several t statistics; Worsley (Journal of the American
Statistical Association 74, 365, 1979) gives its distribution and bounds it by Bonferroni's sum over the splits, which
is used here: it is never too liberal for independent normal errors, whatever the number of splits.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from attn_exp.stats import student_t_p
from attn_exp.verdict import LEVEL

FEWEST = 8
# One value alone may be an accident.
_SHORTEST = 2


@dataclass(frozen=True, slots=True)
class Shift:
    """A change of level: `at` is the index of the first value of the new level, `log` the logarithm of new over old.

    `p` is the probability of a split so clear anywhere in a series without any.
    """

    at: int
    log: float
    p: float


def first_shift(logs: Sequence[float]) -> Shift | None:
    """The clearest split of a series of logarithms, whether it means something or not; None if it is too short."""
    splits = range(_SHORTEST, len(logs) - _SHORTEST + 1)
    if not splits:
        return None
    tested = [(_t(logs, at), at) for at in splits]
    t, at = max(tested, key=lambda one: abs(one[0]))
    p = min(1.0, len(tested) * student_t_p(t, len(logs) - 2))
    return Shift(at, statistics.fmean(logs[at:]) - statistics.fmean(logs[:at]), p)


def shifts(logs: Sequence[float], smallest: float, level: float = LEVEL) -> list[Shift]:
    """The changes of level in a series of at least 8 logarithms, in order; those below `smallest` (a log) left out.

    `level` is the error rate of each test. A shorter series has none.
    """
    return _search(logs, 0, smallest, level) if len(logs) >= FEWEST else []


def _search(logs: Sequence[float], start: int, smallest: float, level: float) -> list[Shift]:
    found = first_shift(logs)
    if found is None or found.p > level or abs(found.log) < smallest:
        return []
    before = _search(logs[: found.at], start, smallest, level)
    after = _search(logs[found.at :], start + found.at, smallest, level)
    return [*before, Shift(start + found.at, found.log, found.p), *after]


def _t(logs: Sequence[float], at: int) -> float:
    """Student's t of the two parts' means, with their pooled variance."""
    one, other = logs[:at], logs[at:]
    mean_one, mean_other = statistics.fmean(one), statistics.fmean(other)
    squares = math.fsum((x - mean_one) ** 2 for x in one) + math.fsum((x - mean_other) ** 2 for x in other)
    error = math.sqrt(squares / (len(logs) - 2) * (1 / len(one) + 1 / len(other)))
    difference = mean_other - mean_one
    if error == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error
