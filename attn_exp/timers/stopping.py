"""When a row of turns stops: its ratio to the fastest is known, or time or rounds are used up."""

from dataclasses import dataclass

from attn_exp.core.record.flags import STABLE

# The least rounds take no longer than this, but they are five.
LONG_US, LONG_CALL_ROUNDS = 100_000.0, 5
# Seconds of a pass after which nothing goes on: for the first rival, and for each further one.
LIMIT_S, LIMIT_EACH_S = 5.0, 1.0


@dataclass(frozen=True)
class StoppingRule:
    """The rule that ends the sampling of a rival, after at least `min_rounds` rounds.

    - `precise`: the relative half-width of its ratio to the fastest is at most `precision` (of the 95 % interval over
      rounds), of the fastest that of its own median.
    - `decided`: the interval of the ratio excludes that both are equal, and its own is at most `stable`.
    - `max_rounds`: there are `max_rounds` rounds.
    - `budget`: its blocks took `budget_s` seconds, and its interval is at most `stable`; or the pass takes too long.

    The least rounds of long calls are fewer: as many as take 0.1 s, but five.

    Raises:
        ValueError: `min_rounds` is above `max_rounds`.
    """

    precision: float
    min_rounds: int
    max_rounds: int
    budget_s: float
    stable: float = STABLE

    def __post_init__(self) -> None:
        if self.min_rounds > self.max_rounds:
            raise ValueError(f"min_rounds={self.min_rounds} cannot be reached in max_rounds={self.max_rounds}")

    def least_rounds(self, call_us: float) -> int:
        """Return the number of rounds before which no rule stops."""
        return min(self.min_rounds, max(LONG_CALL_ROUNDS, int(LONG_US / call_us)))

    def limit_s(self, rivals: int) -> float:
        """Return how many seconds a pass of so many rivals may take, rests included."""
        return max(LIMIT_S, self.budget_s) + LIMIT_EACH_S * (rivals - 1)

    def over(self, rounds: int, spent_s: float, half: float, *, late: bool = False) -> str:
        """Return why a rival stops that is not precise after these rounds, or nothing to go on."""
        if rounds >= self.max_rounds:
            return "max_rounds"
        return "budget" if late or (spent_s >= self.budget_s and half <= self.stable) else ""
