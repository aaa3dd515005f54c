"""Several duels after one another: those of `duel -m`, and those that a comparison proposes."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence

from attn_exp.core.redaction import redacted
from attn_exp.core.text import duration


def run_many(duels: Sequence[Sequence[str]], run: Callable[[Sequence[str]], int]) -> int:
    """Run the duels, each given by its words behind `attn-exp duel`, and return the largest exit code.

    A line on standard error says which one it is, and how long the rest will take. One that cannot be measured does not
    keep the others from being run.
    """
    began, codes = time.monotonic(), list[int]()
    for index, words in enumerate(duels):
        each_s = (time.monotonic() - began) / index if index else 0.0
        left = f", {duration(each_s * (len(duels) - index))} left" if index else ""
        shown = redacted(shlex.join(["attn-exp", "duel", *words]))
        print(f"[{index + 1}/{len(duels)}{left}] {shown}", file=sys.stderr, flush=True)
        codes.append(run(words))
    failed = sum(code != 0 for code in codes)
    if failed:
        print(f"{failed} of {len(duels)} duels could not be measured", file=sys.stderr)
    return max(codes, default=0)
