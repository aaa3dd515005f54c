"""What a process that draws is asked, and what it answers (process.py)."""

from dataclasses import dataclass

# A single job needs no plot, and is no rival.
FEWEST = 2


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to draw: the sweep in folder `sweep` into folder `into`; no chart is begun after `limit_s` seconds."""

    sweep: str
    into: str
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Done:
    """The names of the files that were written, and why there are no others, if that is a mistake.

    `left_out` says that there was no time for all of them.
    """

    files: tuple[str, ...] = ()
    mistake: str | None = None
    left_out: bool = False
