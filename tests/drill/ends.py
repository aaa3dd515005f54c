"""Ends at random moments: a command is ended again and again, the first seconds included, and then let through.

Each time in a new folder with a new database, and a few ends in a row before the same command is let through: what an
end leaves meets the next one.
"""

import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import attn_exp
from drill.command import Command, Running, When
from drill.evidence import held_locks, processes, wrong
from drill.plan import Plan

_PACKAGE = Path(attn_exp.__file__).parent
_JOBS, _IN_A_ROW, _AT_ONCE = 4, 5, 2
# An end comes up to so much later than what it follows.
_AFTER_S = 1.5
_ENDS = {
    "SIGKILL": (signal.SIGKILL,),
    "Ctrl-C": (signal.SIGINT,),
    "Ctrl-C twice": (signal.SIGINT, signal.SIGINT),
    "SIGHUP": (signal.SIGHUP,),
    "SIGTERM": (signal.SIGTERM,),
}


class Ends:
    """Several series of ends, two at once.

    Attributes:
        counts: how many ends there were, by how and by what was there then.
        wrong: what does not hold, in sentences.
    """

    def __init__(self, world: Path, ends: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._world, self._left, self._seed = world, ends, seed
        self._series = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Go on until there were as many ends as wanted."""
        threads = [threading.Thread(target=self._go_on, daemon=True) for _ in range(_AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.wrong += [f"process {number} is left" for number in processes(self._world)] + held_locks(self._world)

    def _go_on(self) -> None:
        while self._left > 0:
            with self._lock:
                self._series += 1
                series = self._series
            self._one(series)

    @staticmethod
    def _whens(command: Command, database: Path) -> list[When]:
        """What an end follows: the start, the making of the database, its being there, or some of the records."""
        new = database.with_name(f".{database.name}.new")
        made = [lambda: new.exists() or database.exists(), database.exists]
        return [0.0, *made, *(count / _JOBS for count in range(1, _JOBS + 1))]

    def _one(self, series: int) -> None:
        """End the command of a series some times, let it through, and check it."""
        chance = random.Random(f"{self._seed} {series}")
        home = self._world / str(series)
        home.mkdir()
        plan = Plan(f"ended-{series}", _JOBS, {})
        plan.write(home / "plan.json")
        database = home / "mlruns" / "mlflow.db"
        folder = home / "multirun" / plan.sweep
        command = Command(home, plan.sweep, _JOBS, home / "plan.json", folder, [], timeout_s=300)
        said: list[str] = []
        known = len(self.wrong)
        for _ in range(_IN_A_ROW):
            how, before = chance.choice(sorted(_ENDS)), _contents(command)
            pause_s = chance.uniform(0, _AFTER_S)

            def end(running: Running, how: str = how, pause_s: float = pause_s) -> None:
                time.sleep(pause_s)
                running.signal(*_ENDS[how])

            ended = command.run((chance.choice(self._whens(command, database)), end))
            said.append(ended.said)
            self._compare(plan.sweep, before, command)
            if ended.code == 0:
                break
            there = f"{ended.records} records" if ended.records else "no record, a database"
            with self._lock:
                self._left -= 1
                self.counts[f"ended by {how}"] += 1
                self.counts[f"then there were {there if database.exists() else 'neither record nor database'}"] += 1
        before = _contents(command)
        ended = command.run()
        self._compare(plan.sweep, before, command)
        if ended.code != 0:
            self.wrong.append(f"{plan.sweep}: exit code {ended.code}: {ended.said[-800:]}")
        for text in (*said, ended.said):
            # Not one of Python's own, which it prints where a signal meets an import.
            if "Traceback" in text and str(_PACKAGE) in text:
                self.wrong.append(f"{plan.sweep}: a traceback: {text[-1500:]}")
        self.wrong += wrong(plan, command, database)
        for line in self.wrong[known:]:
            print(f"WRONG: {line}", flush=True)
        print(f"{self._left} to go, {len(self.wrong)} things do not hold", flush=True)

    def _compare(self, sweep: str, before: dict[Path, bytes], command: Command) -> None:
        """Whole records stay as they are."""
        after = _contents(command)
        self.wrong += [f"{sweep}: {path} was measured twice" for path in before if before[path] != after.get(path)]


def _contents(command: Command) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in command.records()}
