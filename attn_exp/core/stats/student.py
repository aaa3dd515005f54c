"""Student's t distribution. Uses only the standard library."""

import math
import statistics
from functools import cache


def student_t_975(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t.

    It is exact for 1 and 2 degrees of freedom. From 3 it is the Cornish-Fisher expansion in 1/degrees (Abramowitz and
    Stegun 26.7.5), with an error below 0.5 % at 3 and below 0.01 % from 7.
    """
    if degrees == 1:
        return 12.706204736432095
    if degrees == 2:
        return 4.302652729911275
    z, terms = _expansion()
    return z + math.fsum(term / degrees ** (power + 1) for power, term in enumerate(terms))


@cache
def _expansion() -> tuple[float, tuple[float, ...]]:
    """Return the normal distribution's quantile, and the terms of the expansion around it."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z, (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )


def student_t_p(t: float, degrees: int) -> float:
    """Return the probability that Student's t is further from 0 than `t`, on either side.

    I_x(degrees / 2, 1 / 2) at x = degrees / (degrees + t^2), the regularised incomplete beta function (Abramowitz and
    Stegun 26.7.1, 26.5.27). The relative error is below 1e-11 up to 1,000 degrees of freedom, also for tiny values.
    """
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


def student_t_within(t: float, degrees: int) -> float:
    """Return the probability that Student's t lies between -`t` and `t`, negative for a negative `t`.

    The finite series of Abramowitz and Stegun 26.7.3 and 26.7.4: faster than `student_t_p`, but only its absolute error
    is small.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd, square = degrees % 2, cosine * cosine
    term, total = (cosine if odd else 1.0), 0.0
    # The powers of the cosine up to degrees - 2, each with the next factor 2/3, 4/5 ... or 1/2, 3/4 ...
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= square * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
