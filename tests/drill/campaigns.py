"""Campaigns: what happens to the two sweeps of a drill, and in which order."""

import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from test_tracking_database import older
from test_tracking_patience import SICK

from attn_exp.core.errors import RecordError
from attn_exp.core.files import remove
from attn_exp.core.record.file import read_record
from drill.command import ACCENT_IN_ASCII, SECRETS, Command, Ended, Running, Step, can_contain
from drill.disk import Disk
from drill.evidence import HOME, Evidence, cut_in_half, wrong
from drill.odd import DATABASES, Private, hostile_words, plant, plant_before, read_only
from drill.plan import FIRST_END, LARGE, Plan, struck
from drill.server import Server, sick_server
from drill.writers import Writers

_MOST_RUNS = 6
# Making a database takes half a second to a second and a half.
_MAKING_S, _TRIES = 0.5, 4
_AT_ONCE = 4
_SAVED_JOBS = 12
# Each takes seconds, mostly of waiting: the two sweeps share them.
_SICK_SERVED, _SICK_LOCAL = list(SICK)[::2], list(SICK)[1::2]
ENDS = {
    "Ctrl-C pressed twice": (signal.SIGINT, signal.SIGINT),
    "the terminal closed (SIGHUP)": (signal.SIGHUP,),
    "the parent ended by SIGTERM": (signal.SIGTERM,),
}
LACKING = "a host that lacks calls of the system"
SAVED = "a backend's file saved while a sweep ran"
CONTAINER = "the container ended with all that is in it"
# What a command says that left something to do.
_UNDONE = re.compile("without a result|(?<!logging to )MLflow at |cannot write to ")
Say = Callable[[str], None]


@dataclass
class Campaign:
    """One sweep of a drill and what was found about it."""

    plan: Plan
    command: Command
    database: Path
    say: Say
    chance: random.Random
    private: Private
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _beside: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.evidence = Evidence(self.plan)

    def run(self, *steps: Step, **options: Any) -> Ended:
        """Run the command once more, with the options of `Command.run`, and look at what it left."""
        began = time.monotonic()
        ended = self.command.run(*steps, **options)
        self._ended_beside()
        self.evidence.look(self.command)
        # Who was killed together with the parent left no trace: it strikes again.
        for batch in self.evidence.unseen():
            struck(self.command.plan, batch).unlink(missing_ok=True)
        seconds = time.monotonic() - began
        self.say(f"{self.plan.sweep}: exit code {ended.code} after {seconds:.0f} s, {ended.records} records")
        for line in ended.said.splitlines():
            if _UNDONE.search(line):
                self.say(f"{self.plan.sweep}: it said: {line[:160]}")
        if any(value in ended.said for value in SECRETS.values()):
            self.wrong.append(f"{self.plan.sweep}: it said the value of a secret variable")
        self.counts["an accent on a terminal of ASCII"] += ended.said.count(ACCENT_IN_ASCII)
        if "Traceback" in ended.said:
            self.wrong.append(f"{self.plan.sweep}: a traceback: {ended.said[-1500:]}")
        return ended

    def kill(self, running: Running) -> None:
        """Kill the parent in the middle, when those that were started beside it are refused: one would take over."""
        for process in self._beside:
            process.wait()
        running.signal(signal.SIGKILL)

    def kill_while_made(self) -> None:
        """Kill the parent while it makes MLflow's database, at a moment that chance chooses."""
        lock = self.database.with_name(f"{self.database.name}.lock")

        def kill(running: Running) -> None:
            time.sleep(self.chance.uniform(0, _MAKING_S))
            running.signal(signal.SIGKILL)

        for _ in range(_TRIES):
            remove(lock)
            ended = self.run((lock.exists, kill))
            if ended.code == -signal.SIGKILL and not self.database.exists():
                self.counts["the parent killed while MLflow's database is made"] += 1
                return
            # It was made before.
            remove(self.database)

    def end(self, fault: str, share: float, numbers: Sequence[signal.Signals]) -> None:
        """End the parent in the middle by signals."""
        ended = self.run((share, lambda running: running.signal(*numbers)))
        if ended.code == 0:
            # It was through before.
            return
        self.counts[fault] += 1

    def again(self, _: Running) -> None:
        """Start the same command beside the one that runs, several times at once; `run` waits for them.

        Every other one is in a container of its own, where no process of the others has a number.
        """
        contain = can_contain()
        self._beside += [self.command.start(contained=contain and bool(count % 2)) for count in range(_AT_ONCE)]

    def end_container(self) -> None:
        """Run the command in a container that shares the folder, and end it with all that is in it after a job."""
        if not can_contain():
            self.say(f"{self.plan.sweep}: no container, since this system lets nobody make a namespace of processes")
            self.counts[CONTAINER] += 1
            return
        before = len(self.command.records())
        # Earlier there may be no container yet, and the command goes on.
        kill = (lambda: len(self.command.records()) > before, lambda running: running.signal(signal.SIGKILL))
        ended = self.run(kill, contained=True)
        if ended.records < self.plan.jobs:
            self.counts[CONTAINER] += 1

    def sick(self, kind: str, port: int = 0) -> None:
        """Run the command with a sick server: on the port of a healthy one, or in the place of its database."""
        with sick_server(SICK[kind], port) as (uri, asked):
            self.killed(self.run(more=["tracker.patience_s=2", f"tracker.uri={uri}"]))
            self.counts[f"a sick tracking server: {kind}"] += asked()

    def odd_database(self, kind: str) -> None:
        """Run the command with something odd where its database goes: it refuses, and leaves it as it is."""
        DATABASES[kind](self.database)
        before = self.database.lstat()
        self._refused(f"in the place of the database: {kind}", str(self.database))
        after = self.database.lstat()
        if (before.st_ino, before.st_size, before.st_mtime) != (after.st_ino, after.st_size, after.st_mtime):
            self.wrong.append(f"{self.plan.sweep}: {kind} in the place of the database was changed")
        remove(self.database)

    def protected_database(self) -> None:
        """Run the command with a database that cannot be written."""
        with read_only(self.database) as protected:
            if protected:
                self._refused("a read-only database", str(self.database))

    def _refused(self, fault: str, word: str, more: Sequence[str] = ()) -> None:
        ended = self.run(more=more)
        if ended.code == 2 and word in ended.said:
            self.counts[fault] += 1
        else:
            self.wrong.append(f"{self.plan.sweep}: not refused, exit code {ended.code}: {fault}: {ended.said[-800:]}")

    def lose_identity(self) -> None:
        """Remove the file that names the sweep in the store."""
        (self.command.folder / "sweep.id").unlink()
        self.counts["the sweep's identity lost"] += 1

    def lacking(self) -> None:
        """Run the command on a host without calls that may be lacking; MLflow itself needs chmod."""
        library = self.command.temporary.with_name(f"lacking-{self.plan.sweep}.so")
        source = Path(__file__).with_name("lacking.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        lacks = {"LD_PRELOAD": str(library), "LACKING": "pidfd_open flock_lock fsync link"}
        self.counts[LACKING] += self.run(variables=lacks).code == 0

    def save_backend(self) -> None:
        """Save a backend's file in the middle of a sweep of its own, which ends; the same command measures the rest."""
        file = self.command.plan.with_name("saved_backend.py")
        file.write_text("from drill.backend import Drilled as Saved\n")
        command = self.command.of_own_backend("saved", _SAVED_JOBS, "saved_backend.Saved")
        ended = command.run((0.1, lambda running: file.write_text(f"{file.read_text()}# saved\n")))
        finished = command.run()
        statuses = Counter(read_record(path.parent).status for path in command.records())  # type: ignore[union-attr]
        if ended.code == 2 and "were changed while the sweep ran" in ended.said and 0 < ended.records < _SAVED_JOBS:
            self.counts[SAVED] += 1
        # The job that the worker had begun may say that its backend's files were changed.
        if finished.code != 0 or statuses["ok"] < _SAVED_JOBS or statuses.total() - statuses["ok"] > 1:
            self.wrong.append(f"{SAVED}: exit code {finished.code}, {dict(statuses)}: {finished.said[-800:]}")

    def plant(self) -> None:
        """Plant links and odd things in the sweep's folder."""
        self.counts += plant(self.command.folder, self._whole(), self.private, self.chance)

    def look(self) -> None:
        """Let all commands that read records read what was planted, and for some of them words that do harm, too."""
        with hostile_words(self._whole()[0]):
            ended = [(reader, self.command.read(reader)) for reader in ("compare", "explain")]
        for reader, one in [*ended, ("log", self.command.read("log"))]:
            # A page about a sweep has what is broken in it, and is no reason to end otherwise.
            if one.code not in ((0, 3) if reader == "explain" else (3,)) or "Traceback" in one.said:
                self.wrong.append(f"{self.plan.sweep}: {reader} ended with {one.code}: {one.said[-1500:]}")
            obeyed = [line for line in one.said.splitlines() if set(line) & set("\x1b\x07\u009b\u202e")]
            if obeyed:
                self.wrong.append(f"{self.plan.sweep}: {reader} obeyed a record: {obeyed[:3]}")
            self.counts[f"odd and strange things read by {reader}"] += 1

    def older_database(self) -> None:
        """Refuse a database of an older MLflow."""
        place = self.command.temporary / "older.db"
        older(place)
        # Onto another disk.
        shutil.move(place, self.database)
        self._refused("a database of an older MLflow, refused", "older MLflow", [])
        self.database.unlink()

    def _whole(self) -> list[Path]:
        """The records that can be lost: not those that show a fault for good, which strikes only once."""
        kept = [batch for batch, fault in self.plan.faults.items() if fault == "out of memory"]
        return [path for path in self.command.records() if _batch(path) not in (None, *kept, *self.evidence.unseen())]

    def _ended_beside(self) -> None:
        while self._beside:
            process = self._beside.pop()
            said, _ = process.communicate()
            refused = process.returncode == 2 and "another command is running" in said
            self.counts["the same command twice at once"] += refused
            if not refused:
                self.wrong.append(f"{self.plan.sweep}: a second command ended with {process.returncode}: {said[-800:]}")

    def killed(self, ended: Ended) -> None:
        """Count a parent that was killed before all jobs were done."""
        if ended.code == -9 and ended.records < self.plan.jobs:
            self.counts["the parent killed by SIGKILL"] += 1

    def cut(self) -> None:
        """Cut some records in half."""
        paths = self._whole()
        self.counts["records cut in half"] += cut_in_half(self.chance.sample(paths, max(1, len(paths) // 8)))

    def finish(self) -> None:
        """Run the same command until it has nothing left to do, once more, and check all that must hold."""
        for _ in range(_MOST_RUNS):
            ended = self.run()
            if ended.code == 0 and not _UNDONE.search(ended.said):
                break
        before = {path: path.read_bytes() for path in self.command.records()}
        again = self.run()
        if again.code != 0 or f"{self.plan.jobs} of {self.plan.jobs} jobs were done before" not in again.said:
            self.wrong.append(f"{self.plan.sweep}: the same command again does not find all done: {again.said[-800:]}")
        if before != {path: path.read_bytes() for path in self.command.records()}:
            self.wrong.append(f"{self.plan.sweep}: the same command again changed records")
        self.counts += self.evidence.counts()
        self.counts["no home and no entry of the user"] += any(self.command.temporary.glob(f"{HOME}*"))
        self.wrong += self.evidence.blamed
        self.wrong += wrong(self.plan, self.command, self.database)


def _batch(path: Path) -> int | None:
    try:
        record = read_record(path.parent)
    except RecordError:
        return None
    return None if record is None else record.request.case.batch


def served(campaign: Campaign, server: Server) -> None:
    """Into a tracking server that is sick, goes away, and comes back."""
    stopped_at = time.time()

    def stop(_: Running) -> None:
        nonlocal stopped_at
        server.stop()
        stopped_at = time.time()

    def start(_: Running) -> None:
        # What was done while there was no server: proof that it was missed.
        done = sum(path.stat().st_mtime > stopped_at for path in campaign.command.records())
        campaign.counts["the tracking server stopped and started"] += done > 0
        campaign.counts["jobs done without a server"] += done
        server.start()

    server.start()
    campaign.killed(campaign.run((0.15, stop), (0.35, start), (0.5, campaign.kill)))
    campaign.cut()
    campaign.plant()
    campaign.look()
    for share, (fault, numbers) in zip((0.55, 0.65, 0.75), ENDS.items(), strict=True):
        campaign.end(fault, share, numbers)
    campaign.run((0.85, stop), (0.95, start))
    # If the command was through before.
    server.stop()
    for kind in _SICK_SERVED:
        campaign.sick(kind, server.port)
    server.start()
    campaign.lose_identity()
    campaign.finish()


def local(campaign: Campaign, disk: Disk) -> None:
    """Into sqlite that is anything but a database, or that eight others lock, on a disk that fills up."""
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

    campaign.counts[plant_before(campaign.command.folder, campaign.chance)] += 1
    large = campaign.plan.jobs >= LARGE // 2
    steps: list[Step] = [(0.05, lock), (0.25, unlock)]
    # A small sweep has to last until all of them have come, on a busy machine too.
    shares = (0.55, 0.65, 0.75) if large else (0.35, 0.4, 0.45)
    later: list[Step] = list(zip(shares, (set_back, set_right, full), strict=True))
    if large:
        for kind in DATABASES:
            campaign.odd_database(kind)
        campaign.kill_while_made()
        campaign.older_database()
        campaign.killed(campaign.run(*steps, (0.3, campaign.again), (FIRST_END, campaign.kill)))
        campaign.cut()
        campaign.protected_database()
        campaign.end_container()
        ended = campaign.run(*later)
    else:
        ended = campaign.run(*steps, *later)
        campaign.cut()
    told = disk.error in ended.said
    campaign.counts[f"the disk full ({disk.kind})"] += told and ended.code != 0 and ended.records < campaign.plan.jobs
    disk.empty()
    campaign.plant()
    if large:
        campaign.look()
        for kind in _SICK_LOCAL:
            campaign.sick(kind)
        campaign.lacking()
        campaign.save_backend()
    campaign.finish()
