"""Evidence: which faults really happened, by what they left, and what is wrong at the end."""

import contextlib
import fcntl
import os
import sqlite3
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

from attn_exp.core.errors import RecordError
from attn_exp.core.record.file import FILE_NAME, LOG_NAME, read_record
from attn_exp.core.record.record import Record
from attn_exp.execution import context
from attn_exp.tracking.base import LIST_PLACE, ended_at
from attn_exp.tracking.base import metrics as shown
from drill.command import SECRETS, Command
from drill.plan import QUOTES, Plan, struck

# What a fault of the plan leaves in a record: its status, and a word of its reason.
_LEFT = {
    "killed by SIGKILL": ("crashed", "SIGKILL"),
    "killed by SIGTERM": ("crashed", "SIGTERM"),
    "segmentation fault": ("crashed", "SIGSEGV"),
    "exit in a library": ("crashed", "exited with code 3"),
    "hang": ("timeout", "took longer than"),
    "out of memory": ("out_of_memory", ""),
    QUOTES: ("error", "cannot log in with"),
}
# And what one leaves in a job's log that does not change its record.
_LOGGED = {"a log of two gigabytes": "bytes were left out here"}
# What the home of a user without one begins with, in the folder for temporary files.
HOME = "attn_exp-home-"
# By so much a record's end lies before its file's, which the kernel's clock wrote.
_SET_BACK_S = 1000.0

# They stay: the system lets go of a lock when its holder ends, not of the file.
LOCKS = (context.LOCK_NAME,)


class Evidence:
    """What one sweep's files have shown so far, and each thing once: a record is told by its job and its end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen: dict[str, set[tuple[str, float]]] = {}
        self._victims: set[int] = set()
        # What is wrong already, in sentences.
        self.blamed: list[str] = []

    def look(self, command: Command) -> None:
        """Look at all records that lie there now."""
        for path in command.records():
            try:
                record, written_at = read_record(path.parent), path.stat().st_mtime
            except RecordError:
                continue
            assert record is not None
            batch = record.request.case.batch
            fault = self._plan.faults.get(batch)
            if fault is not None and _shows(fault, record, path.parent) and struck(command.plan, batch).exists():
                self._see(fault, record)
                self._victims.add(batch)
            if fault is None and "before it took the job" in (record.reason or ""):
                self.blamed.append(f"{record.request.label} is charged with another job's fault: {record.reason}")
            if written_at - record.finished_at > _SET_BACK_S:
                self._see("the clock set back an hour (jobs)", record)

    def unseen(self) -> list[int]:
        """The batches of which no record has shown their fault yet."""
        return [batch for batch in self._plan.faults if batch not in self._victims]

    def counts(self) -> Counter[str]:
        return Counter({what: len(seen) for what, seen in self._seen.items()})

    def _see(self, what: str, record: Record) -> None:
        self._seen.setdefault(what, set()).add((record.request.job, record.finished_at))


def _shows(fault: str, record: Record, folder: Path) -> bool:
    """Return whether a record, or its job's log, shows a fault that has struck."""
    status, word = _LEFT.get(fault, ("ok", ""))
    if fault in _LOGGED and _LOGGED[fault] not in (folder / LOG_NAME).read_text(errors="replace"):
        return False
    return record.status == status and word in (record.reason or "")


def cut_in_half(paths: list[Path]) -> int:
    """Cut records in half, as a file system may leave them after a power cut; how many are no records since."""
    for path in paths:
        os.truncate(path, path.stat().st_size // 2)
    broken = 0
    for path in paths:
        try:
            read_record(path.parent)
        except RecordError:
            broken += 1
    return broken


def wrong(plan: Plan, command: Command, database: Path) -> list[str]:
    """What does not hold at the end of a sweep, in sentences."""
    found, records = [], {}
    for folder in (path for path in command.folder.iterdir() if path.is_dir() and not path.is_symlink()):
        record = read_record(folder)
        if record is None:
            found.append(f"{folder.name} has no record")
            continue
        records[record.request.job] = record
        # The last one stays where nobody else had taken memory.
        fits = record.status == "ok" or (record.status, plan.faults.get(record.request.case.batch)) == (
            "out_of_memory", "out of memory"
        )  # fmt: skip
        if not fits or not record.final:
            found.append(f"{record.request.label} is {record.status}: {record.reason}")
    batches = sorted(record.request.case.batch for record in records.values())
    if batches != list(range(1, plan.jobs + 1)):
        found.append(f"there are records of {len(batches)} jobs, not of each of {plan.jobs} one")
    found += _wrong_runs(records, database, command.sweep)
    return [f"{plan.sweep}: {line}" for line in found + litter(command)]


def _wrong_runs(records: dict[str, Record], database: Path, sweep: str) -> list[str]:
    found = []
    with contextlib.closing(sqlite3.connect(database)) as store:
        runs = store.execute("SELECT run_uuid, status FROM runs WHERE lifecycle_stage = 'active'").fetchall()
        tags: dict[str, dict[str, str]] = {}
        for run, key, value in store.execute("SELECT run_uuid, key, value FROM tags"):
            tags.setdefault(run, {})[key] = value
        # The place in the list is not of the record.
        count = "SELECT run_uuid, COUNT(*) FROM latest_metrics WHERE key != ? GROUP BY run_uuid"
        metrics = dict(store.execute(count, (LIST_PLACE,)))
        places = dict(store.execute("SELECT run_uuid, artifact_uri FROM runs"))
    found += [f"run {run} is left RUNNING" for run, status in runs if status == "RUNNING"]
    parents = [status for run, status in runs if tags[run].get("attn_exp.kind") == "sweep"]
    if parents != ["FINISHED"]:
        found.append(f"there is not one finished run of the sweep, but {parents}")
    by_job: dict[str, list[str]] = {}
    for run, status in runs:
        if tags[run].get("attn_exp.kind") != "job":
            continue
        job = tags[run]["attn_exp.job"]
        by_job.setdefault(job, []).append(run)
        record = records.get(job)
        if record is None:
            found.append(f"run {run} is of {job}, which has no record")
            continue
        if status != ("FINISHED" if record.status == "ok" else "FAILED"):
            found.append(f"the run of {job} is {status}, its record {record.status}")
        if tags[run].get("attn_exp.finished_at") != ended_at(record):
            found.append(f"the run of {job} is of another try than its record")
        if metrics.get(run, 0) != len(shown(record)):
            found.append(f"the run of {job} has {metrics.get(run, 0)} metrics, its record {len(shown(record))}")
        if not _has_record(database, places[run], run):
            found.append(f"the run of {job} lacks its record")
    found += [f"{job} has {len(there)} runs" for job, there in by_job.items() if len(there) != 1]
    found += [f"{job} has no run" for job in records if job not in by_job]
    return found


def _has_record(database: Path, place: str, run: str) -> bool:
    served = database.parent / "artifacts" / "1" / run / "artifacts"
    local = unquote(place.removeprefix("file://")) if place.startswith("file://") else place
    folder = Path(local) if local.startswith("/") else served
    return (folder / FILE_NAME).is_file()


def litter(command: Command) -> list[str]:
    """Temporary files that a sweep left in its folder or where such files go."""
    hidden = [path for path in command.folder.rglob("*") if path.name.startswith((".", "filler"))]
    own = [path for path in hidden if path.parent != command.folder or path.name not in LOCKS]
    # That of a user without a home stays.
    temporary = [path for path in command.temporary.iterdir() if not path.name.startswith(HOME)]
    return [f"a temporary file is left: {path}" for path in [*own, *temporary]]


def leaks(world: Path) -> list[str]:
    """Files that have the value of a secret variable."""
    values = {name: value.encode() for name, value in SECRETS.items()}
    found = []
    for path in world.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        found += [f"the value of {name} is in {path}" for name, value in values.items() if value in content]
    return found


def held_locks(world: Path) -> list[str]:
    """Lock files that somebody holds, databases that are locked, and journals of writes that nobody ended."""
    found = []
    for path in world.rglob("*.lock"):
        with path.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                found.append(f"a lock is held: {path}")
    for path in world.rglob("*.db"):
        with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as database:
            try:
                database.execute("BEGIN EXCLUSIVE")
                database.execute("ROLLBACK")
            except sqlite3.OperationalError as error:
                found.append(f"{path}: {error}")
    found += [f"a write was never ended: {path}" for path in world.rglob("*.db-journal")]
    return found


def processes(world: Path) -> list[int]:
    """Processes that work in a folder of this world, ourselves left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if (entry / "cwd").resolve().is_relative_to(world):
                found.append(int(entry.name))
    return found
