"""Intervals for the mean of rounds that depend on each other. Uses only the standard library.

Rounds share clocks, temperature and neighbours, so each of them tells less than an independent one would. How much
less cannot be read off seven rounds: their autocorrelation is known to +-0.4 at best. Student's interval takes it for
0, and with 0.8 it covers the truth in half of the cases. Here all values are weighed. Rounds are a stationary series,
x_i - mean = phi (x_(i-1) - mean) + noise, whose memory phi is one of `MEMORIES`. Given the rounds, the mean's
distribution is a mixture (Zellner and Tiao, Journal of the American Statistical Association 59, 763, 1964). Each phi
adds Student's t about the generalised least-squares mean, weighted by how probable phi makes the rounds.

`bench/intervals.py` simulates what the intervals cover and what they cost.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from attn_exp.core.stats.student import student_t_975, student_t_p, student_t_within

# Each memory with its weight before anything is measured. 0.95 covers up to 0.8 with few rounds, where the largest is
# never ruled out; with many, its weight vanishes unless the rounds show it. It weighs more than the others because of
# rules that look after each round whether to stop, and so favour rounds that look independent by chance.
MEMORIES = ((0.0, 2 / 9), (0.3, 2 / 9), (0.6, 2 / 9), (0.95, 3 / 9))
_LEVEL = 0.95
# Below the square of any spread that a clock can resolve; a series that one memory explains exactly has none.
_LEAST_SQUARES = 1e-300


@dataclass(frozen=True, slots=True)
class _Memory:
    """One memory's part of the distribution: Student's t about `mean`, in units of `scale`.

    `effective` is the number of independent rounds that would determine the mean as well.
    """

    weight: float
    mean: float
    scale: float
    effective: float


class RoundsMean:
    """The mean of a value of each round, in the order of the rounds, and what the rounds say about it.

    Raises:
        ValueError: fewer than 2 rounds.
    """

    def __init__(self, values: Sequence[float]) -> None:
        if len(values) < 2:
            raise ValueError(f"an interval needs at least 2 rounds, not {len(values)}")
        self.rounds = len(values)
        self.mean = math.fsum(values) / self.rounds
        self._deviations = [value - self.mean for value in values]
        self._squares = math.fsum(one * one for one in self._deviations)

    @property
    def autocorrelation(self) -> float | None:
        """The rounds' autocorrelation at lag 1, not corrected for its bias; None below 3 rounds or without a spread."""
        if self.rounds < 3 or self._squares < _LEAST_SQUARES:
            return None
        products = (one * other for one, other in zip(self._deviations, self._deviations[1:], strict=False))
        return math.fsum(products) / self._squares

    @property
    def effective_rounds(self) -> float | None:
        """The number of independent rounds that would say as much about the mean; None without a spread."""
        if self._squares < _LEAST_SQUARES:
            return None
        return math.fsum(one.weight * one.effective for one in self._memories)

    def half_width(self, about: float | None = None) -> float:
        """Return the half-width of the 95 % interval about the mean, or about another value near it."""
        offset = 0.0 if about is None else about - self.mean
        if self._squares < _LEAST_SQUARES:
            return abs(offset)
        quantile = student_t_975(self.rounds - 1)
        # Each memory's own interval at least, and at most the one that contains all of them.
        low = min(quantile * one.scale for one in self._memories)
        high = max(quantile * one.scale + abs(one.mean - offset) for one in self._memories)
        below, above = self._within(low, offset) - _LEVEL, self._within(high, offset) - _LEVEL
        if below >= 0:
            return low
        # The Illinois variant of the regula falsi: the end that stays counts half. Dowell and Jarratt, BIT 11, 168
        # (1971).
        stayed = 0
        for _ in range(60):
            if high - low <= 1e-9 * high or above <= 0:
                break
            middle = (low * above - high * below) / (above - below)
            excess = self._within(middle, offset) - _LEVEL
            if abs(excess) < 1e-12:
                return middle
            if excess < 0:
                low, below, above, stayed = middle, excess, above / 2 if stayed < 0 else above, -1
            else:
                high, above, below, stayed = middle, excess, below / 2 if stayed > 0 else below, 1
        return high

    def p_value(self, value: float) -> float:
        """Return the two-sided p-value for the mean being `value`: 0.05 at the ends of `half_width`'s interval."""
        # Rounds that agree to the last bit (a coarse clock) leave no doubt either way.
        if self._squares < _LEAST_SQUARES:
            return float(self.mean == value)
        half = abs(self.mean - value)
        outside = (
            one.weight * (self._beyond((half - one.mean) / one.scale) + self._beyond((half + one.mean) / one.scale))
            for one in self._memories
        )
        return min(1.0, math.fsum(outside))

    def _within(self, half: float, offset: float) -> float:
        """Return the probability that the mean lies within `half` of `offset`, both relative to the rounds' mean."""
        degrees = self.rounds - 1
        return math.fsum(
            one.weight
            / 2
            * (
                student_t_within((offset + half - one.mean) / one.scale, degrees)
                - student_t_within((offset - half - one.mean) / one.scale, degrees)
            )
            for one in self._memories
        )

    def _beyond(self, t: float) -> float:
        """Return the probability that Student's t is above `t`."""
        tail = student_t_p(t, self.rounds - 1) / 2
        return tail if t > 0 else 1 - tail

    @cached_property
    def _memories(self) -> list[_Memory]:
        """The parts of the mean's distribution, relative to the rounds' mean, with weights that add up to 1."""
        n, found, logs = self.rounds, [], []
        first, *others = self._deviations
        inner = math.fsum(others[:-1])
        for phi, weight in MEMORIES:
            # With the inverse of the correlation matrix of a stationary series, times 1 - phi^2: the ones' squared
            # norm, the generalised least-squares mean, and the sum of squares about it.
            norm = (1 - phi) * (n - (n - 2) * phi)
            mean = (1 - phi) * (first + others[-1] + (1 - phi) * inner) / norm
            steps = zip(self._deviations, others, strict=False)
            residuals = (now - mean - phi * (before - mean) for before, now in steps)
            squares = math.fsum([(1 - phi * phi) * (first - mean) ** 2, *(one * one for one in residuals)])
            squares = max(squares, _LEAST_SQUARES)
            # The rounds' probability with mean and standard deviation integrated out.
            logs.append(
                math.log(weight)
                + (math.log1p(-phi * phi) - math.log(norm) - (n - 1) * math.log(squares / self._squares)) / 2
            )
            found.append((mean, math.sqrt(squares / (n - 1) / norm), norm / (1 - phi * phi)))
        largest = max(logs)
        weights = [math.exp(log - largest) for log in logs]
        total = math.fsum(weights)
        return [_Memory(weight / total, *part) for weight, part in zip(weights, found, strict=True)]


def log_half_width(values: Sequence[float], about: float | None = None) -> float | None:
    """Return half the 95 % interval of the mean logarithm of a value of each round, about the relative half-width.

    `about` is what the interval is symmetrical about, in the unit of `values`: by default their geometric mean. Further
    from that, the interval is as much wider as it takes to contain the mean as often. None below 2 rounds.
    """
    if len(values) < 2:
        return None
    return RoundsMean([math.log(value) for value in values]).half_width(None if about is None else math.log(about))


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """The half-width of a 95 % interval, with the degrees of freedom that say how fast its error's tails fall."""

    half: float
    degrees: float = math.inf

    @property
    def quantile(self) -> float:
        """The half-width in standard errors."""
        return student_t_975(self.degrees)

    def p_value(self, distance: float) -> float:
        """Return the two-sided p-value of a distance that would be 0 but for this uncertainty."""
        if self.half == 0:
            return float(distance == 0)
        errors = abs(distance) / self.half * self.quantile
        if math.isinf(self.degrees):
            return math.erfc(errors / math.sqrt(2))
        return student_t_p(errors, int(self.degrees))


def combined(parts: Iterable[Uncertainty]) -> Uncertainty:
    """Return the uncertainty of a sum of independent errors: the root of the half-widths' sum of squares.

    The degrees of freedom are Welch and Satterthwaite's (Biometrics Bulletin 2, 110, 1946), rounded down.
    """
    known = [one for one in parts if one.half > 0]
    if not known:
        return Uncertainty(0.0)
    variances = [(one.half / one.quantile) ** 2 for one in known]
    largest = max(variances)
    shares = [variance / largest for variance in variances]
    doubt = math.fsum(share * share / one.degrees for share, one in zip(shares, known, strict=True))
    degrees = math.fsum(shares) ** 2 / doubt if doubt > 0 else math.inf
    return Uncertainty(
        math.hypot(*(one.half for one in known)), max(1, math.floor(degrees + 1e-9)) if doubt else degrees
    )
