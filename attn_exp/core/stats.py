"""Statistics of samples: quantiles, and a confidence interval over rounds. Uses only the standard library."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Statistics of one call's samples in microseconds.

    `low_us` and `high_us` bound the 95 % confidence interval over rounds; None below two rounds.
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


def student_t_975(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t.

    Exact for 1 and 2 degrees of freedom; from 3 the Cornish-Fisher expansion in 1/degrees (Abramowitz and Stegun
    26.7.5), with an error below 0.5 % at 3 and below 0.01 % from 7.
    """
    if degrees < 1:
        raise ValueError("Student's t needs at least one degree of freedom")
    if degrees == 1:
        return 12.706204736432095
    if degrees == 2:
        return 4.302652729911275
    z = statistics.NormalDist().inv_cdf(0.975)
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees ** (power + 1) for power, term in enumerate(terms))


def student_t_p(t: float, degrees: int) -> float:
    """Return the probability that Student's t is further from 0 than `t`, on either side.

    I_x(degrees / 2, 1 / 2) at x = degrees / (degrees + t^2), the regularised incomplete beta function (Abramowitz and
    Stegun 26.7.1, 26.5.27). The relative error is below 1e-11 up to 1,000 degrees of freedom, also for tiny values.

    Raises:
        ValueError: there is no degree of freedom, or `t` is not a number.
    """
    if degrees < 1:
        raise ValueError("Student's t needs at least one degree of freedom")
    if math.isnan(t):
        raise ValueError("Student's t is not a number")
    square = t * t
    x, a = degrees / (degrees + square), degrees / 2
    # The fraction converges fast below the mean; above it, the symmetry I_x(a, b) = 1 - I_(1-x)(b, a) applies (DLMF
    # 8.17.4).
    if x < (a + 1) / (a + 2.5):
        return _incomplete_beta(x, square / (degrees + square), a, 0.5)
    return 1.0 - _incomplete_beta(square / (degrees + square), x, 0.5, a)


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """Return I_x(a, b) with `rest` = 1 - x, by the continued fraction DLMF 8.17.22 (Abramowitz and Stegun 26.5.8).

    Lentz's method evaluates the fraction from its head with two ratios in each step (Applied Optics 15, 668, 1976).
    None of them vanishes for x below (a + 1) / (a + b + 2).
    """
    if x == 0.0:  # t is 0, or its square overflows
        return 0.0
    log_front = a * math.log(x) + b * math.log(rest) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    value, upper, lower = 1.0, 1.0, 0.0
    for step in range(1, 10_000):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        upper, lower = 1.0 + term / upper, 1.0 / (1.0 + term * lower)
        value *= upper * lower
        if abs(upper * lower - 1.0) < 1e-15:
            break
    return math.exp(log_front) / a / value


def round_medians(times_us: Sequence[float], rounds: Sequence[int]) -> list[float]:
    """Return the median of each round, in the order of the rounds."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for time_us, index in zip(times_us, rounds, strict=True):
        by_round[index].append(time_us)
    return [statistics.median(by_round[index]) for index in sorted(by_round)]


def log_half_width(medians_us: Sequence[float]) -> float | None:
    """Return half the 95 % t-interval of the mean of log round-medians, about the relative half-width.

    None below 2 rounds.
    """
    if len(medians_us) < 2:
        return None
    logs = [math.log(median) for median in medians_us]
    return student_t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))


def summarize(times_us: Sequence[float], rounds: Sequence[int]) -> Summary:
    """Summarize samples in time order with the index of each sample's round.

    The confidence interval is over rounds, not over samples: calls inside one round share clocks and temperature, and
    an interval that treats them as independent covers the true value far too seldom. Outliers (beyond 3 interquartile
    ranges, Tukey's far out) are counted, never dropped.
    """
    ordered = sorted(times_us)
    middle = quantile(ordered, 0.5)
    low = high = None
    half = log_half_width(round_medians(times_us, rounds))
    if half is not None:
        low, high = middle * math.exp(-half), middle * math.exp(half)
    q1, q3 = quantile(ordered, 0.25), quantile(ordered, 0.75)
    fence = 3 * (q3 - q1)
    return Summary(
        n=len(ordered),
        rounds=len(set(rounds)),
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
    )
