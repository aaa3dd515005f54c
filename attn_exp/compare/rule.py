"""One rule of an answer: the backend to take for some cases, by how much, and what is open among them."""

from collections.abc import Sequence
from dataclasses import dataclass

from attn_exp.results.cell import ChosenMetric

# What the first interval of several is introduced by.
LEVEL = "95 % CI: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The backend to take for some cases.

    `where` says which in words, empty for all. `label` is empty if it is open in each of the cases. `same` are backends
    that ran the same kernel as `label` there, `equal` those that duels found equivalent, and `ties` those that are too
    close to it to call in each of the cases.
    `ratio` is how many times better it is than `over`, the best of the others (of several where `over_next`), as a
    geometric mean over the `n` passes of all `cases`, with its 95 % interval; None without others. In `without` of the
    passes `over` has no result, and `compared` are in the mean: all others but those in doubt. `by_pass` has the mean
    of each pass of several.

    Of the passes `wins` are sure, in `close` two are too close to call, and `open` are undecided: there `perhaps` are
    backends whose rows are in doubt, for the reasons `doubts`, and may be better than `than`, the best of the others,
    up to `lead` times. `than` is empty where each row is in doubt; then `perhaps` look best.
    """

    where: str
    wins: int
    close: int
    open: int
    n: int
    cases: int
    label: str = ""
    same: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()
    over: str | None = None
    over_next: bool = False
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    perhaps: tuple[str, ...] = ()
    than: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    lead: float | None = None
    without: int = 0
    compared: int = 0
    by_pass: tuple[tuple[str, float], ...] = ()

    @property
    def order(self) -> int:
        """What sorts rules: sure picks before those that are too close to call, and what is open last."""
        return 0 if self.wins else 1 if self.label else 2

    @property
    def has_interval(self) -> bool:
        """Whether there are others whose rows are known well enough."""
        return None not in (self.over, self.ratio, self.low, self.high)

    def sentence(self, metric: ChosenMetric, *, level: bool = False) -> str:
        """Return the rule as hyperfine puts it: `cudnn is 1.27 [1.25, 1.29] times as fast as flash, 12 of 12 cases`.

        With `level` it says which interval that is: the first of several sentences does.
        """
        said = f"undecided in {counted(self.cases, self.n)}: {self._looks(metric)}"
        if self.label:
            said = self._picked(metric, LEVEL if level else "")
            said += f"; undecided in {self.open}: {self._looks(metric)}" if self.open else ""
        return f"{self.where}: {said}" if self.where else said

    def _picked(self, metric: ChosenMetric, level: str) -> str:
        who = f"{self.label} (same kernel: {', '.join(self.same)})" if self.same else self.label
        who += f" (equivalent in a duel: {', '.join(self.equal)})" if self.equal else ""
        surely = "surely in " if self.wins < self.n else ""
        sure = f"{surely}{of_all_passes(self.wins, self.n, self.cases)}"
        if self.over is None or self.ratio is None or self.low is None or self.high is None:
            return f"{who} is {best(metric)}, {sure}, and all others are in doubt"
        times = f"{times_text(self.ratio)} [{level}{times_text(self.low)}, {times_text(self.high)}] times"
        compared = f"{times} {_better(metric)} {'the next best, ' if self.over_next else ''}{self.over}"
        each = [f"{direction} {times_text(ratio)}" for direction, ratio in self.by_pass]
        if self.compared not in (self.n - self.without, self.wins):
            each.insert(0, f"mean of {self.compared}")
        compared += f" ({', '.join(each)})" if each else ""
        ties = self.ties or ((self.over,) if not self.wins else ())
        if ties and not self.wins:
            close = f"{who} and {and_text(ties)} are too close to call"
            return f"{close}, {counted(self.cases, self.n)}; {self.label} is {compared}"
        without = f" ({self.over} has no result in {self.without})" if self.without else ""
        return f"{who} is {compared}, {sure}{without}"

    def _looks(self, metric: ChosenMetric) -> str:
        doubts, several = f"({', '.join(self.doubts)})", len(self.perhaps) > 1
        who = and_text(self.perhaps)
        if not self.than or self.lead is None:
            looks = f"; {who} {'look' if several else 'looks'} best" if who else ""
            return f"each row is in doubt {doubts}{looks}"
        than = self.than[0] if len(self.than) == 1 else "the best that is not in doubt"
        if self.lead <= 1:
            return f"{who} {doubts} may be {_better(metric)} {than}"
        looks = "look up to" if several else "looks up to" if self.open > 1 else "looks"
        return f"{who} {doubts} {looks} {times_text(self.lead)} times {_better(metric)} {than}"


def _better(metric: ChosenMetric) -> str:
    return "as fast as" if metric.kind.follows_clock else f"better by {metric} than"


def best(metric: ChosenMetric) -> str:
    """Return what the best by a metric is called: `the fastest`, `the best by joules_per_call`."""
    return "the fastest" if metric.kind.follows_clock else f"the best by {metric}"


def times_text(value: float) -> str:
    """Return how many times: three digits."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def counted(cases: int, passes: int) -> str:
    """Return how many cases, or passes of cases if they are more: `1 case`, `3 passes of 2 cases`."""
    said = "1 case" if cases == 1 else f"{cases} cases"
    return said if cases == passes else f"{passes} passes of {said}"


def of_all_passes(some: int, passes: int, cases: int) -> str:
    """Return how many passes of some cases: `6 of 6 cases`, `6 of 6 cases in each pass`, `5 of 9 passes of 6 cases`."""
    if some != passes:
        return f"{some} of {counted(cases, passes)}"
    return f"{cases} of {counted(cases, cases)}{' in each pass' if passes > cases else ''}"


def and_text(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
