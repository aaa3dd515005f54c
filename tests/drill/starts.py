"""Starts at the same moment: two or four commands of one sweep, with the same jobs or with jobs that overlap.

Each time in a new folder with a new database. Those that are refused are started again, all at once, until all of them
are through.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from drill.command import Command
from drill.evidence import held_locks, processes, wrong
from drill.plan import Plan

_JOBS = 4
# How many commands there are at once, and whether their jobs are the same. The first takes the fewest starts.
_KINDS = [(2, False), (4, True), (2, True), (4, False)]
_MOST_TIMES = 6
_MEASURED = re.compile(r"^\[\d+/\d+\] ok", re.MULTILINE)


class Starts:
    """Several starts, one after another.

    Attributes:
        counts: how many there were of each kind, and how many commands were refused.
        wrong: what does not hold, in sentences.
    """

    def __init__(self, world: Path, starts: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._world, self._starts = world, starts

    def run(self) -> None:
        """Go through all kinds in turns."""
        for number in range(self._starts):
            self._one(number, *_KINDS[number % len(_KINDS)])
            print(f"{self._starts - number - 1} to go, {len(self.wrong)} things do not hold", flush=True)
        self.wrong += [f"process {number} is left" for number in processes(self._world)] + held_locks(self._world)

    def _one(self, number: int, count: int, same: bool) -> None:
        self.counts[f"{count} at the same moment, {'the same' if same else 'overlapping'} jobs"] += 1
        home = self._world / str(number)
        home.mkdir()
        plan = Plan(f"started-{number}", _JOBS, {})
        plan.write(home / "plan.json")
        command = Command(home, plan.sweep, _JOBS, home / "plan.json", home / "multirun" / plan.sweep, [], 300)
        waiting, measured = [_jobs(index, same) for index in range(count)], 0
        for _ in range(_MOST_TIMES):
            started = [command.start([f"batch={','.join(map(str, jobs))}"]) for jobs in waiting]
            said = [process.communicate()[0] for process in started]
            measured += sum(len(_MEASURED.findall(text)) for text in said)
            waiting = self._refused(plan.sweep, started, said, waiting)
            if not waiting:
                break
        else:
            self.wrong.append(f"{plan.sweep}: {len(waiting)} of {count} commands were refused {_MOST_TIMES} times")
        if measured != _JOBS:
            self.wrong.append(f"{plan.sweep}: {measured} jobs were measured, not each of {_JOBS} once")
        self.wrong += wrong(plan, command, home / "mlruns" / "mlflow.db")

    def _refused(
        self, sweep: str, started: Sequence["subprocess.Popen[str]"], said: Sequence[str], jobs: Sequence[list[int]]
    ) -> list[list[int]]:
        """Return the jobs of the commands that another one kept from running."""
        again = []
        for process, text, own in zip(started, said, jobs, strict=True):
            if process.returncode == 2 and "another command is running" in text:
                self.counts["refused while another one runs"] += 1
                again.append(own)
            elif process.returncode != 0 or "Traceback" in text:
                self.wrong.append(f"{sweep}: exit code {process.returncode}: {text[-800:]}")
        return again


def _jobs(index: int, same: bool) -> list[int]:
    """Return the batches of a command: all of them, or all but one or two at an end, so that all are somebody's."""
    left_out = index // 2 + 1
    first, last = (1, _JOBS - left_out) if index % 2 == 0 else (1 + left_out, _JOBS)
    return list(range(1, _JOBS + 1) if same else range(first, last + 1))
