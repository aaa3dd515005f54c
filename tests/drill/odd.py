"""Odd things where a file is expected: in a sweep's folder, and where MLflow's database goes."""

import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from test_strange_records import STRANGE

from attn_exp.core.errors import RecordError
from attn_exp.core.files import remove
from attn_exp.core.record.file import decode_record

Plant = Callable[[Path], object]


def _folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "own").write_text("somebody's")


# In the place of a record, or of a file that names the sweep.
IN_PLACE: dict[str, Plant] = {
    "a pipe": os.mkfifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "an empty folder": lambda path: path.mkdir(),
    "a folder with a file": _folder_with_a_file,
}
# In the place of MLflow's database, when there is none yet.
DATABASES: dict[str, Plant] = {
    "a link to nothing": lambda path: path.symlink_to("nowhere/x.db"),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a text": lambda path: path.write_text("not this" * 100),
    "a database of another program": lambda path: _database(path, "CREATE TABLE mine (x)"),
    "a half-made database": lambda path: _database(path, "CREATE TABLE experiments (x)"),
}
# How many records say what no record can.
_STRANGE = 3
_LINKS = ("table.txt", "table.csv", "report.html", "plots", "command.txt")


def _database(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()


class Private:
    """A folder outside of the sweeps, to which planted links lead, and which must stay as it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.key = folder / "key"
        self.key.write_text("very private")

    def touched(self) -> list[str]:
        """What is wrong with it, in sentences."""
        there = sorted(path.name for path in self._folder.iterdir())
        if there != ["key"] or self.key.read_text() != "very private":
            return [f"something was written outside of the sweeps: {there}, {self.key.read_text()[:100]!r}"]
        return []


def plant_before(folder: Path, chance: random.Random) -> str:
    """Make a sweep's folder with something odd in the place of its identity, which it then cannot store; what it is."""
    folder.mkdir(parents=True)
    kind = chance.choice([name for name in IN_PLACE if "folder" not in name])
    IN_PLACE[kind](folder / "sweep.id")
    return f"in the place of sweep.id: {kind}"


def plant(folder: Path, records: list[Path], private: Private, chance: random.Random) -> Counter[str]:
    """Put links to the private folder into a sweep's, and odd things in the place of its records and a job; how many.

    Args:
        folder: the sweep's.
        records: whole ones, of which one is lost for each of `IN_PLACE`, and one more with its folder.
        private: where the links lead.
        chance: chooses among the records.
    """
    planted: Counter[str] = Counter()
    for name in _LINKS:
        remove(folder / name)
        (folder / name).symlink_to(private.key if "." in name else private.key.parent)
        planted[f"links out of the sweep: {name}"] += 1
    victims = chance.sample(records, len(records))
    for kind, record in zip(chance.sample(sorted(IN_PLACE), len(IN_PLACE)), victims, strict=False):
        record.unlink()
        IN_PLACE[kind](record)
        planted[f"in the place of a record: {kind}"] += 1
    for record in victims[len(IN_PLACE) : len(IN_PLACE) + 1]:
        shutil.rmtree(record.parent)
        record.parent.symlink_to(record.parent.name)
        planted["in the place of a job: a link to itself"] += 1
    for record in victims[len(IN_PLACE) + 2 : len(IN_PLACE) + 2 + _STRANGE]:
        planted[_make_strange(record, chance)] += 1
    for record in victims[len(IN_PLACE) + 1 :][:1]:
        remove(record.parent / "profiles")
        (record.parent / "profiles").symlink_to(private.key.parent)
        planted["links out of the sweep: JOB/profiles"] += 1
    return planted


def _make_strange(record: Path, chance: random.Random) -> str:
    """Change a record so that it is none: in a way that chance chooses among those of another test that apply."""
    for kind, (change, _) in chance.sample(sorted(STRANGE.items()), len(STRANGE)):
        tree = json.loads(record.read_bytes())
        with contextlib.suppress(KeyError, IndexError):
            change(tree)
        try:
            decode_record(json.dumps(tree).encode(), record)
        except RecordError:
            record.write_text(json.dumps(tree))
            return f"a strange record: {kind}"
    raise AssertionError("no change applies")


@contextlib.contextmanager
def hostile_words(record: Path) -> Iterator[None]:
    """Put a record whose words a terminal would obey beside another one."""
    tree = json.loads(record.read_bytes())
    tree["request"] |= {"job": "words", "model": "\x1b]0;x\x07[x](javascript:x)"}
    tree["request"]["backend"] |= {"name": "=cmd|x\x1b[31m\u202e", "_target_": "../../../evil.Boom"}
    tree |= {"notes": {"x": "\x1b[2J"}, "reason": "\x1b[2J\u009b31m"}
    folder = record.parents[1] / "words"
    folder.mkdir()
    try:
        (folder / record.name).write_text(json.dumps(tree))
        yield
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[bool]:
    """Let a file be read only: by a mount where that is allowed, else by its mode; whether it is, as root may write."""
    mounted = _tried("mount", "--bind", str(path), str(path))
    if mounted:
        _tried("mount", "-o", "remount,ro,bind", str(path))
    else:
        path.chmod(0o444)
    try:
        yield not os.access(path, os.W_OK)
    finally:
        if mounted:
            _tried("umount", str(path))
        else:
            path.chmod(0o644)


def _tried(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
