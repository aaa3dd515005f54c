"""Statistics of samples: quantiles, and a confidence interval over rounds. Uses only the standard library."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from attn_exp.core.stats.interval import RoundsMean


@dataclass(frozen=True)
class Summary:
    """Statistics of one call's samples in microseconds.

    `low_us` and `high_us` bound the 95 % confidence interval over rounds; None below two rounds. `autocorrelation` is
    the rounds' at lag 1, and `effective_rounds` how many independent ones would say as much; None where rounds are too
    few or do not differ.
    """

    n: int
    rounds: int
    median_us: float
    low_us: float | None
    high_us: float | None
    mean_us: float
    min_us: float
    p5_us: float
    p20_us: float
    p80_us: float
    p95_us: float
    relative_spread: float
    outliers: int
    autocorrelation: float | None = None
    effective_rounds: float | None = None

    @property
    def half_width(self) -> float | None:
        """Return the relative half-width of the confidence interval: 0.01 is +-1 %."""
        if self.low_us is None or self.high_us is None:
            return None
        return (self.high_us - self.low_us) / 2 / self.median_us


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Interpolate linearly between order statistics (Hyndman and Fan 1996, type 7, as NumPy's default)."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def medians_by_round(times_us: Sequence[float], rounds: Sequence[int]) -> dict[int, float]:
    """Return the median of each round by its index, in the order of the rounds."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for time_us, index in zip(times_us, rounds, strict=True):
        by_round[index].append(time_us)
    return {index: statistics.median(by_round[index]) for index in sorted(by_round)}


def round_medians(times_us: Sequence[float], rounds: Sequence[int]) -> list[float]:
    """Return the median of each round, in the order of the rounds."""
    return list(medians_by_round(times_us, rounds).values())


def summarize(times_us: Sequence[float], rounds: Sequence[int]) -> Summary:
    """Summarize samples in time order with the index of each sample's round.

    The confidence interval is over rounds, not over samples, because calls inside one round share clocks and
    temperature. An interval that treats them as independent covers the true value far too seldom. Outliers (beyond 3
    interquartile ranges, Tukey's far out) are counted, never dropped.

    The interval is symmetrical about the median of all samples, on a logarithmic scale, and contains the geometric mean
    of the rounds' medians as often as it says. If the two differ, as with rounds in two states, it is wider.
    """
    ordered = sorted(times_us)
    middle = quantile(ordered, 0.5)
    low = high = autocorrelation = effective = None
    medians = round_medians(times_us, rounds)
    if len(medians) > 1:
        mean = RoundsMean([math.log(median) for median in medians])
        half = mean.half_width(math.log(middle))
        low, high = middle * math.exp(-half), middle * math.exp(half)
        autocorrelation, effective = mean.autocorrelation, mean.effective_rounds
    q1, q3 = quantile(ordered, 0.25), quantile(ordered, 0.75)
    fence = 3 * (q3 - q1)
    return Summary(
        n=len(ordered),
        rounds=len(medians),
        median_us=middle,
        low_us=low,
        high_us=high,
        mean_us=statistics.fmean(ordered),
        min_us=ordered[0],
        p5_us=quantile(ordered, 0.05),
        p20_us=quantile(ordered, 0.2),
        p80_us=quantile(ordered, 0.8),
        p95_us=quantile(ordered, 0.95),
        relative_spread=(quantile(ordered, 0.8) - quantile(ordered, 0.2)) / middle,
        outliers=sum(1 for time in ordered if time < q1 - fence or time > q3 + fence),
        autocorrelation=autocorrelation,
        effective_rounds=effective,
    )
