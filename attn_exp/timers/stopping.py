"""When sampling stops: the interval over the rounds is narrow enough, or time or rounds are used up."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from attn_exp.core.record.flags import STABLE
from attn_exp.core.stats.interval import log_half_width

# The least rounds take no longer than this, but they are five.
LONG_US, LONG_CALL_ROUNDS = 100_000.0, 5


@dataclass(frozen=True)
class StoppingRule:
    """The rule that ends sampling, with the first of these stop reasons, after at least `min_rounds` rounds.

    - `precise`: the relative half-width is at most `precision` (of the 95 % interval over rounds).
    - `max_rounds`: there are `max_rounds` rounds.
    - `budget`: `budget_s` seconds have passed.

    A single call whose interval would be marked `unstable` by then goes on, until it is not or `patience_s` seconds
    have passed. Its rounds are then joined in pairs as often as there are too many.

    The least rounds of long calls are fewer: as many as take 0.1 s, but five. Nothing stops before `least_s` seconds.

    Raises:
        ValueError: `min_rounds` is above `max_rounds`: joining rounds would go on for ever.
    """

    precision: float
    min_rounds: int
    max_rounds: int
    budget_s: float
    patience_s: float = 0.0
    least_s: float = 0.0

    def __post_init__(self) -> None:
        if self.min_rounds > self.max_rounds:
            raise ValueError(f"min_rounds={self.min_rounds} cannot be reached in max_rounds={self.max_rounds}")

    def least_rounds(self, call_us: float) -> int:
        """Return the number of rounds before which no rule stops."""
        return min(self.min_rounds, max(LONG_CALL_ROUNDS, int(LONG_US / call_us)))

    def verdict(
        self, series: Sequence[Sequence[float]], call_us: float, elapsed_s: float, about: float | None = None
    ) -> str | None:
        """Return why to stop after these rounds, or None to continue.

        `series` has values that have to be precise, one for each round: medians, or ratios of medians. `about` is the
        centre of a single call's interval, by default the median of its values.
        """
        rounds = len(series[0])
        if rounds < self.least_rounds(call_us) or elapsed_s < self.least_s:
            return None
        # Lazily: where one is not precise yet, the others need no interval.
        half_widths = (log_half_width(values, about or statistics.median(values)) for values in series)
        widest = 0.0
        for half in half_widths:
            widest = max(widest, float("inf") if half is None else half)
            if widest > self.precision:
                break
        else:
            return "precise"
        reason = "max_rounds" if rounds >= self.max_rounds else "budget" if elapsed_s >= self.budget_s else None
        impatient = widest <= STABLE or elapsed_s >= self.patience_s or not self.joins(call_us)
        return reason if impatient else None

    def joins(self, call_us: float) -> bool:
        """Whether enough rounds are left of the most when they are joined in pairs."""
        return self.max_rounds // 2 >= max(2, self.least_rounds(call_us))
