"""Campaigns: what happens to the two sweeps of a drill, and in which order."""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from attn_exp.core.errors import RecordError
from attn_exp.core.record_file import read_record
from drill.command import Command, Ended, Running
from drill.disk import Disk
from drill.evidence import Evidence, cut_in_half, wrong
from drill.plan import Plan, struck
from drill.server import Server
from drill.writers import Writers

_MOST_RUNS = 6
# With fewer jobs more of it happens in one run of the command: each costs seconds to start.
_LARGE = 50
# What a command says that left something to do.
_UNDONE = ("without a result", "MLflow at ", "cannot write to ")
Say = Callable[[str], None]


@dataclass
class Campaign:
    """One sweep of a drill and what was found about it."""

    plan: Plan
    command: Command
    database: Path
    say: Say
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.evidence = Evidence(self.plan)

    def run(self, *steps: tuple[float, Callable[[Running], None]]) -> Ended:
        """Run the command once more and look at what it left."""
        began = time.monotonic()
        ended = self.command.run(*steps)
        self.said.append(ended.said)
        self.evidence.look(self.command)
        # Who was killed together with the parent left no trace: it strikes again.
        for batch in self.evidence.unseen():
            struck(self.command.plan, batch).unlink(missing_ok=True)
        seconds = time.monotonic() - began
        self.say(f"{self.plan.sweep}: exit code {ended.code} after {seconds:.0f} s, {ended.records} records")
        for line in ended.said.splitlines():
            if any(words in line for words in _UNDONE):
                self.say(f"{self.plan.sweep}: it said: {line[:160]}")
        if "Traceback" in ended.said:
            self.wrong.append(f"{self.plan.sweep}: a traceback: {ended.said[-1500:]}")
        return ended

    def kill(self, running: Running) -> None:
        """Kill the parent in the middle."""
        running.kill()

    def killed(self, ended: Ended) -> None:
        """Count a parent that was killed before all jobs were done."""
        if ended.code == -9 and ended.records < self.plan.jobs:
            self.counts["the parent killed by SIGKILL"] += 1

    def cut(self) -> None:
        """Cut some records in half; not those that show a fault that strikes only once."""
        paths = [path for path in self.command.records() if _batch(path) not in self.plan.faults]
        self.counts["records cut in half"] += cut_in_half(self.chance.sample(paths, max(1, len(paths) // 8)))

    def finish(self) -> None:
        """Run the same command until it has nothing left to do, once more, and check all that must hold."""
        for _ in range(_MOST_RUNS):
            ended = self.run()
            if ended.code == 0 and not any(words in ended.said for words in _UNDONE):
                break
        before = {path: path.read_bytes() for path in self.command.records()}
        again = self.run()
        if again.code != 0 or f"{self.plan.jobs} of {self.plan.jobs} jobs were done before" not in again.said:
            self.wrong.append(f"{self.plan.sweep}: the same command again does not find all done: {again.said[-800:]}")
        if before != {path: path.read_bytes() for path in self.command.records()}:
            self.wrong.append(f"{self.plan.sweep}: the same command again changed records")
        self.counts += self.evidence.counts()
        self.wrong += wrong(self.plan, self.command, self.database)


def _batch(path: Path) -> int | None:
    try:
        record = read_record(path.parent)
    except RecordError:
        return None
    return None if record is None else record.request.case.batch


def served(campaign: Campaign, server: Server) -> None:
    """Into a tracking server that goes away, and comes back."""
    stopped_at: list[float] = []
    server.start()

    def stop(_: Running) -> None:
        server.stop()
        stopped_at.append(time.time())

    def start(_: Running) -> None:
        # What was done while there was no server: proof that it was missed.
        done = sum(path.stat().st_mtime > stopped_at[-1] for path in campaign.command.records())
        campaign.counts["the tracking server stopped and started"] += done > 0
        campaign.counts["jobs done without a server"] += done
        server.start()

    campaign.killed(campaign.run((0.15, stop), (0.35, start), (0.5, campaign.kill)))
    campaign.cut()
    if campaign.plan.jobs >= _LARGE:
        campaign.run((0.7, stop), (0.85, start))
    # If the command was through before.
    server.start()
    campaign.finish()


def local(campaign: Campaign, disk: Disk) -> None:
    """Into sqlite that eight others lock, on a disk that fills up, while the clock is set back."""
    writers: list[Writers] = []
    clock = campaign.command.clock

    def lock(_: Running) -> None:
        writers.append(Writers(campaign.database))

    def unlock(_: Running) -> None:
        held = writers.pop().stop()
        campaign.counts["sqlite locked by eight writers (times)"] += sum(held) if min(held) else 0

    def set_back(_: Running) -> None:
        clock.touch()

    def set_right(_: Running) -> None:
        clock.unlink()

    def full(running: Running) -> None:
        disk.fill(running.family())

    locked = (0.05, lock), (0.25, unlock)
    if campaign.plan.jobs >= _LARGE:
        campaign.killed(campaign.run(*locked, (0.45, campaign.kill)))
        campaign.cut()
        ended = campaign.run((0.55, set_back), (0.65, set_right), (0.75, full))
    else:
        # Of few jobs more than a few must be left when the disk is full: they take no second each.
        ended = campaign.run(*locked, (0.3, set_back), (0.45, set_right), (0.5, full))
    told = disk.error in ended.said
    campaign.counts[f"the disk full ({disk.kind})"] += told and ended.code != 0 and ended.records < campaign.plan.jobs
    disk.empty()
    if campaign.plan.jobs < _LARGE:
        campaign.cut()
    campaign.finish()
