"""The search: which of many versions is the first that is slower, and when that cannot be told."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from attn_exp.core.stats.interval import RoundsMean, Uncertainty, combined
from attn_exp.core.stats.paired import VERDICT_LEVEL

# After so many rounds a decision is tried; the error rate of all decisions about one version is VERDICT_LEVEL.
LOOKS = (8, 16, 32)
_LEVEL = VERDICT_LEVEL / len(LOOKS)
# Rounds further from their median than this many median deviations were disturbed by other programs.
_SCATTER = 5.0

Side = Literal["slow", "fast"]


@dataclass(frozen=True)
class Round:
    """One round: the logarithm of a version's time over that of the good one, and the same of the canary."""

    ratio: float
    canary: float | None = None


# Returns at least so many rounds of a version (an index) against the good one, or why the version cannot be measured.
Measure = Callable[[int, int], "Sequence[Round] | str"]


@dataclass(frozen=True)
class Answer:
    """The result of a search; `good` and `bad` are indices.

    `found`: the first slow version is `bad`, or one of those that were `skipped` between it and `good`, the last fast
    one. `same`: the ends surely differ by less than the margin. `undecided`: `good` and `bad` enclose what is left.
    `effect` is how much more time the slow end takes, `reason` why nothing was found.
    """

    kind: Literal["found", "same", "undecided"]
    good: int
    bad: int
    effect: float
    skipped: tuple[tuple[int, str], ...] = ()
    reason: str = ""


def search(count: int, measure: Measure, margin: float, said: Callable[[int, str], None]) -> Answer:
    """Find the first slow one of `count` versions, of which the first is fast and the last is slow.

    A version is slow if it is like the slow end (`side_of`). It takes log2(count) steps if no version is skipped. The
    ends have to differ by `margin` (0.01 is 1 %).
    """
    good, bad, skipped = 0, count - 1, dict[int, str]()
    for rounds in LOOKS:
        ends = measure(bad, rounds)
        if isinstance(ends, str):
            return Answer("undecided", good, bad, 0.0, reason=f"the bad end cannot be measured: {ends}")
        mean = _mean(ends).mean
        if mean >= math.log1p(margin) and decided(ends, 0.0) == "slow":
            break
        low, high = _interval(ends)
        reason = f"the bad end takes {100 * math.expm1(low):+.1f} to {100 * math.expm1(high):+.1f} % more time"
        if max(-low, high) <= math.log1p(margin):
            return Answer("same", good, bad, math.expm1(mean), reason=reason)
    else:
        return Answer("undecided", good, bad, math.expm1(mean), reason=reason)
    effect, threshold = math.expm1(mean), mean / 2
    if _canary_moved(ends, threshold):
        return Answer("undecided", good, bad, effect, reason="the canary differs between the ends too")
    said(bad, f"{100 * effect:+.1f} %: slow, as the bad end")
    while True:
        between = tuple((index, why) for index, why in sorted(skipped.items()) if good < index < bad)
        untried = [index for index in range(good + 1, bad) if index not in skipped]
        if not untried:
            return Answer("found", good, bad, effect, between)
        middle = min(untried, key=lambda index: (abs(2 * index - good - bad), index))
        side: Side | None = None
        rounds_of: Sequence[Round] = ()
        for rounds in LOOKS:
            measured = measure(middle, rounds)
            if isinstance(measured, str):
                skipped[middle] = measured
                break
            rounds_of = measured
            if (side := side_of(measured, ends)) is not None:
                break
        if middle in skipped:
            said(middle, f"skipped: {skipped[middle]}")
            continue
        found = math.expm1(_mean(rounds_of).mean)
        if side is None or _canary_moved(rounds_of, threshold):
            why = "the canary differs as well" if side else f"{len(rounds_of)} rounds do not tell which end it is like"
            said(middle, f"{100 * found:+.1f} %: undecided, {why}")
            return Answer("undecided", good, bad, effect, between, f"{100 * found:+.1f} % at one of them: {why}")
        said(middle, f"{100 * found:+.1f} %: {side}")
        good, bad = (good, middle) if side == "slow" else (middle, bad)


def side_of(rounds: Sequence[Round], ends: Sequence[Round]) -> Side | None:
    """Return the end that a version is like, the bad one having the rounds `ends`; None if that is open.

    It surely differs from the other end. If it differs from both, the middle of them on the log scale divides.
    """
    mean, end = _mean(rounds), _mean(ends)

    def beyond(share: float) -> Side | None:
        """Return on which side of a share of the way from the good end to the bad one it surely is."""
        parts = [Uncertainty(part * one.half_width(), one.rounds - 1) for part, one in ((1.0, mean), (share, end))]
        distance = mean.mean - share * end.mean
        return None if combined(parts).p_value(distance) > _LEVEL else "slow" if distance > 0 else "fast"

    from_good, from_bad = decided(rounds, 0.0) == "slow", beyond(1.0) == "fast"
    if from_good != from_bad:
        return "slow" if from_good else "fast"
    return beyond(0.5) if from_good else None


def decided(rounds: Sequence[Round], threshold: float) -> Side | None:
    """Return on which side of a threshold the mean of the log ratios surely is; None if that is open."""
    mean = _mean(rounds)
    if mean.p_value(threshold) > _LEVEL:
        return None
    return "slow" if mean.mean > threshold else "fast"


def _mean(rounds: Sequence[Round]) -> RoundsMean:
    """Return the mean log ratio; a round that another program disturbed counts no more than the others scatter."""
    ratios = [one.ratio for one in rounds]
    middle = statistics.median(ratios)
    most = _SCATTER * statistics.median(abs(ratio - middle) for ratio in ratios)
    return RoundsMean([min(max(ratio, middle - most), middle + most) for ratio in ratios])


def _interval(rounds: Sequence[Round]) -> tuple[float, float]:
    """Return the ends of the mean log ratio's interval, whose error rate is that of one look."""
    mean = _mean(rounds)
    half = mean.half_width()
    # Rounds without a spread have an interval without a width.
    while half and mean.p_value(mean.mean + half) > _LEVEL:
        half *= 1.05
    return mean.mean - half, mean.mean + half


def _canary_moved(rounds: Sequence[Round], threshold: float) -> bool:
    """Return whether a fixed work differs between the two sides by as much as half of the threshold, and surely."""
    canaries = [one.canary for one in rounds if one.canary is not None]
    if len(canaries) < 2:
        return False
    mean = RoundsMean(canaries)
    return abs(mean.mean) > threshold / 2 and mean.p_value(0.0) <= _LEVEL
