"""Which of several rivals is faster: paired log ratios of interleaved rounds. Uses only the standard library.

The rule holds only for rivals that ran interleaved in one process, one block each a round, in the order of
`abba_order`. Two jobs that ran one after the other differ by whatever the machine did meanwhile. No test on their
samples can tell that from a difference between them.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from attn_exp.core.stats.interval import RoundsMean
from attn_exp.core.stats.multiple import benjamini_hochberg
from attn_exp.core.stats.summary import quantile

# The medians of a rival's rounds: in order, or by the numbers of the rounds.
Times = Sequence[float] | Mapping[int, float]
Verdict = Literal["faster", "slower", "equivalent", "undecided"]

# Medians of one call, taken one after another on an H200, differ by this much: less is no difference.
MARGIN_FLOOR = 0.01
# The error rate of verdicts that rivals differ. A 95 % interval that excludes 0 is not enough: where noise is large,
# what is left after the margin is false in more than 1 % of the comparisons of equal rivals.
VERDICT_LEVEL = 0.01


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """How rival `a` compares with rival `b`; both are indices into the rivals that were compared.

    `effect` is time_b / time_a - 1: 0.03 says that b takes 3 % longer than a. A positive effect goes with the verdict
    `faster`, which is about a. It is exp(mean over rounds of log(median_b / median_a)) - 1; `low` and `high` bound its
    95 % interval over rounds that may depend on each other (core/stats/interval.py), for this pair only. `p` is
    two-sided, for the effect being 0; `p_adjusted` takes the other pairs into account. `margin` is the smallest effect
    that counts.
    """

    a: int
    b: int
    effect: float
    low: float
    high: float
    p: float
    p_adjusted: float
    rounds: int
    margin: float
    verdict: Verdict


def abba_order(rivals: int, round_index: int) -> tuple[int, ...]:
    """The order in which `rivals` rivals run in a round.

    Two rivals run AB, BA, AB, BA ...: ABBA. Each rival stands once in each position in every `rivals` rounds (counted
    from 0). This cancels the cost of a position, and a drift that is the same in each round. With an even number of
    rivals each odd round mirrors the round before. An odd number cannot, since the middle rival would stay there: the
    next `rivals` rounds mirror the first `rivals` ones. Each rival directly follows each other one equally often, over
    `rivals` rounds for an even number and twice as many for an odd one: E. J. Williams, Australian Journal of
    Scientific Research A 2, 149 (1949).
    """
    if rivals % 2 == 0:
        turn, mirrored = round_index // 2 % (rivals // 2), round_index % 2 == 1
    else:
        turn, mirrored = round_index, round_index // rivals % 2 == 1
    # Williams' first row is 0, 1, n - 1, 2, n - 2 ...: neighbours differ by each distance once.
    row = [(position + 1) // 2 if position % 2 else -(position // 2) for position in range(rivals)]
    order = tuple((first + turn) % rivals for first in row)
    return order[::-1] if mirrored else order


@dataclass(frozen=True)
class RatioByRound:
    """The median over common rounds of log(time / time of the other), with the half-width of the interval about it.

    The interval contains the mean in 95 %. `p` is two-sided, for the mean being 0.
    """

    log_ratio: float
    half: float
    rounds: int
    p: float


def paired_by_round(times: Mapping[int, float], other: Mapping[int, float]) -> RatioByRound | None:
    """Compare two rivals by the times of the rounds that both have, by their numbers; None below two rounds."""
    logs = [math.log(times[number] / other[number]) for number in sorted(times.keys() & other.keys())]
    if len(logs) < 2:
        return None
    mean, median = RoundsMean(logs), statistics.median(logs)
    return RatioByRound(median, mean.half_width(median), len(logs), mean.p_value(0.0))


def compare_pair(medians_a: Times, medians_b: Times, margin: float) -> PairedComparison:
    """Compare two rivals by the medians of their rounds, in the order of the rounds, in any one unit of time."""
    return compare_all([medians_a, medians_b], margin)[0]


def compare_all(
    medians_by_rival: Sequence[Times], margin: float, false_discovery_rate: float = VERDICT_LEVEL
) -> list[PairedComparison]:
    """Compare every two rivals (a, b) with a < b, in that order: (0, 1), (0, 2) ... (1, 2) ...

    `faster` or `slower` if Benjamini and Hochberg's procedure over all pairs rejects equality, the pair's 95 % interval
    excludes it, and the effect is at least `margin`. `equivalent` if the 95 % interval lies within `margin` (two
    one-sided tests at 2.5 % each: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 657, 1987). Else
    `undecided`. Both bounds are symmetrical on the log scale, 1 / (1 + margin) to 1 + margin in time_b / time_a, so
    exchanging a and b exchanges `faster` and `slower` and nothing else.

    Args:
        medians_by_rival: a rival's median of each round, in the order of the rounds, or by their numbers, where those
            that both rivals have count; any one unit of time.
        margin: the smallest effect that counts, 0.01 for 1 %; see `margin_from_aa`.
        false_discovery_rate: the expected share of false ones among all rejected equalities.

    Raises:
        ValueError: fewer than 2 rounds, unequal numbers of them, a time that is not positive and finite, or a `margin`
            out of its range.
    """
    if not 0 < margin < math.inf:
        raise ValueError(f"margin must be positive and finite, not {margin}")
    logs, pairs = _logs(medians_by_rival), list[_Pair]()
    for a, b in itertools.combinations(range(len(logs)), 2):
        found = RoundsMean([logs[b][number] - logs[a][number] for number in sorted(logs[a].keys() & logs[b].keys())])
        pairs.append(_Pair(a, b, found.mean, found.half_width(), found.p_value(0.0), found.rounds))
    adjusted = benjamini_hochberg([pair.p for pair in pairs])
    return [
        PairedComparison(
            a=pair.a,
            b=pair.b,
            effect=_effect(pair.mean),
            low=_effect(pair.mean - pair.half_width),
            high=_effect(pair.mean + pair.half_width),
            p=pair.p,
            p_adjusted=p_adjusted,
            rounds=pair.rounds,
            margin=margin,
            verdict=_verdict(pair, math.log1p(margin), rejected=p_adjusted <= false_discovery_rate),
        )
        for pair, p_adjusted in zip(pairs, adjusted, strict=True)
    ]


def margin_from_aa(effects: Sequence[float]) -> float:
    """The smallest effect that counts here: 1 %, or the 95th percentile of |effect| of A/A comparisons if larger.

    The comparisons must have as many rounds as those that it will judge: their effects shrink with more rounds.

    Raises:
        ValueError: no comparison; use `MARGIN_FLOOR` where there is none.
    """
    if not effects:
        raise ValueError("margin needs at least one A/A comparison")
    return max(MARGIN_FLOOR, quantile(sorted(abs(effect) for effect in effects), 0.95))


@dataclass(frozen=True)
class _Pair:
    """The log ratios log(median_b / median_a) of two rivals over rounds."""

    a: int
    b: int
    mean: float
    half_width: float
    p: float
    rounds: int


def _logs(medians_by_rival: Sequence[Times]) -> list[dict[int, float]]:
    counts = {len(medians) for medians in medians_by_rival if not isinstance(medians, Mapping)}
    if len(counts) > 1:
        raise ValueError(f"rivals must have run in the same rounds, but their numbers are {sorted(counts)}")
    every = [dict(one) if isinstance(one, Mapping) else dict(enumerate(one)) for one in medians_by_rival]
    if every and min(map(len, every)) < 2:
        raise ValueError(f"a comparison needs at least 2 rounds, not {min(map(len, every))}")
    for time in itertools.chain.from_iterable(one.values() for one in every):
        if not 0 < time < math.inf:
            raise ValueError(f"times must be positive and finite, not {time}")
    return [{number: math.log(time) for number, time in one.items()} for one in every]


def _verdict(pair: _Pair, log_margin: float, *, rejected: bool) -> Verdict:
    if rejected and abs(pair.mean) > pair.half_width and abs(pair.mean) >= log_margin:
        return "faster" if pair.mean > 0 else "slower"
    if abs(pair.mean) + pair.half_width <= log_margin:
        return "equivalent"
    return "undecided"


def _effect(log_ratio: float) -> float:
    """The ratio minus 1. Infinite beyond the largest float, as the bound of 2 rounds that differ wildly may be."""
    try:
        return math.expm1(log_ratio)
    except OverflowError:
        return math.inf
