"""The commands that go on from a sweep: measure it once more, as another one, compare it, or run its duels."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from attn_exp.compare.comparison import SweepSummary
from attn_exp.results.store import sweep_words, user_path

_TYPED = ["python", "-m", "attn_exp"]


def again(sweeps: Sequence[SweepSummary], *, longer: bool) -> str:
    """Return the command that measures the only sweep of a comparison again; empty if it is unknown.

    It is another sweep, since the same command would keep all of its jobs.

    Args:
        sweeps: what is compared; several sweeps have no such command.
        longer: with `stopping=thorough` in place of the sweep's own.
    """
    if len(sweeps) != 1:
        return ""
    try:
        words = shlex.split(sweeps[0].command)
    except ValueError:
        return ""
    # Two sweeps cannot share a folder.
    if words[:3] != _TYPED or any(word.startswith("folder=") for word in words):
        return ""
    gone = ("sweep=", "stopping=", "stopping.") if longer else ("sweep=",)
    kept = [word for word in words if not word.startswith(gone)]
    return shlex.join([*kept, *(["stopping=thorough"] if longer else []), f"sweep={sweeps[0].name}-again"])


def comparing(sweeps: Sequence[SweepSummary]) -> str:
    """Return the command that compares the only sweep of a comparison; empty if it is not in a folder."""
    if len(sweeps) != 1 or not Path(sweeps[0].place).is_dir():
        return ""
    return shlex.join(["attn-exp", "compare", *sweep_words(Path(sweeps[0].place))])


def opposing(sweeps: Sequence[SweepSummary]) -> str:
    """Return the command that compares the second of two sweeps with the first; empty if they are not in folders."""
    if len(sweeps) != 2 or not all(Path(one.place).is_dir() for one in sweeps):
        return ""
    old, new = (Path(one.place).resolve() for one in sweeps)
    against = old.name if old.parent == new.parent else str(user_path(old))
    return shlex.join(["attn-exp", "compare", *sweep_words(new), f"against={against}"])


def settling(sweeps: Sequence[SweepSummary]) -> str:
    """Return the command that runs the duels of the only sweep of a comparison; empty if it is not in a folder."""
    command = comparing(sweeps)
    return command and f"{command} settle=true"
