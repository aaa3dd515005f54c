"""What flags mean for the picks that rest on their rows: flags that leave a row in the ranking, and may move a pick."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from attn_exp.compare.duel_command import duels
from attn_exp.compare.ranking import Ranking, picks, rank
from attn_exp.compare.rule import and_text
from attn_exp.core.flags import OTHER_CLOCK
from attn_exp.results.cell import ChosenMetric

# The flag of a call whose launch takes longer than the GPU, and the time that users see who launch each call.
_LAUNCHES, _WITH_LAUNCHES = "launch_bound", "event_time_us"


@dataclass(frozen=True, slots=True)
class Caution:
    """One sentence, and the command that would tell; empty if there is none."""

    said: str
    command: str = ""

    def lines(self) -> list[str]:
        """Return the sentence, and the command below it."""
        return [f"{self.said}:", self.command] if self.command else [self.said]


def cautions_of(groups: Sequence[Sequence[Ranking]], metric: ChosenMetric, comparing: str) -> tuple[Caution, ...]:
    """Return what the flags of the best two rows mean for the picks of groups that are decided.

    Args:
        groups: the ranked rows of each case and pass that has a pick.
        metric: what they are ranked by. Only times and rates depend on launches and clocks.
        comparing: the command that compares these rows, to which options may be added; empty if it is unknown.
    """
    if not (metric.kind.has_time_interval and metric.kind.follows_clock):
        return ()
    best_two = [(group, two) for group in groups if (two := _best_two(group, metric)) is not None]
    return (*_launches(best_two, comparing), *_clocks([two for _, two in best_two]))


_Two = tuple[Ranking, Ranking]


def _best_two(group: Sequence[Ranking], metric: ChosenMetric) -> _Two | None:
    """Return the row that is picked, and the next one of another kernel; None without one."""
    known = sorted((row for row in group if row.cell.value is not None), key=lambda row: rank(row.cell, metric))
    first = next((row for row in known if row.best), None)
    own = picks(group)
    other = next((row for row in known if row.cell.result.label not in own), None)
    return None if first is None or other is None else (first, other)


def _launches(best_two: Sequence[tuple[Sequence[Ranking], _Two]], comparing: str) -> list[Caution]:
    marked = [group for group, two in best_two if any(_LAUNCHES in row.cell.flags for row in two)]
    if not marked:
        return []
    moved = Counter(filter(None, map(_with_launches, marked)))
    others = and_text([f"{label} in {count}" for label, count in sorted(moved.items(), key=lambda one: (-one[1], one))])
    then = f"the fastest is {others}" if moved else "they stay"
    said = (
        f"{len(marked)} of {len(best_two)} picks are {_LAUNCHES} and hold in a CUDA graph; "
        f"where the CPU launches each call ({_WITH_LAUNCHES}) {then}"
    )
    command = comparing and f"{comparing} {shlex.quote(f'metric={_WITH_LAUNCHES}')}"
    return [Caution(said, command if moved else "")]


def _with_launches(group: Sequence[Ranking]) -> str | None:
    """Return the label that is the fastest with its launches, if it is not among those that are picked."""
    times = {
        row.cell.result.label: us
        for row in group
        if row.cell.value is not None
        and (us := row.cell.result.metrics.get(f"{row.cell.direction}/{_WITH_LAUNCHES}")) is not None
    }
    fastest = min(times, key=lambda label: times[label], default=None)
    return None if fastest in picks(group) else fastest


def _clocks(best_two: Sequence[_Two]) -> list[Caution]:
    """Return the caution about pairs of which one row was measured at another clock than the other."""
    counts, apart = Counter[str](), list[_Two]()
    for one, two in best_two:
        flags = OTHER_CLOCK.intersection(one.cell.flags) ^ OTHER_CLOCK.intersection(two.cell.flags)
        counts.update(flags)
        apart += [(one, two)] if flags else []
    if not apart:
        return []
    each = ", ".join(f"{flag} {counts[flag]}" for flag in sorted(counts, key=lambda flag: (-counts[flag], flag)))
    said = (
        f"in {len(apart)} of {len(best_two)} picks one of the best two was measured at another clock ({each}); "
        "a duel runs both at the same one"
    )
    return [Caution(said, duels([(one.cell, two.cell) for one, two in apart])[0].command)]
