"""MLflow's sqlite database as a file: its state, read without MLflow, and how it is created and upgraded.

MLflow creates and migrates a database in place, statement by statement, so a process that is killed meanwhile leaves
one that no MLflow opens again. Here both happen in a file beside it, which takes its name once it is whole.
"""

import contextlib
import functools
import importlib.util
import os
import re
import shlex
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote, unquote

from attn_exp.core.errors import UserError
from attn_exp.core.files import folder_until_exit
from attn_exp.tracking.trouble import disk_trouble

_ELSEWHERE = "choose another database with tracker.uri=sqlite:///..."
_REVISION = re.compile(r"^(down_)?revision\b[^=\n]*= *['\"](\w+)['\"]", re.MULTILINE)
# Characters of a path that a URI gives another meaning.
_ENCODED = re.compile(r"[%?#\x00-\x1f\x7f]")
# A process that creates a database holds the lock for seconds; one that upgrades a large one, for a minute.
_LOCK_WAIT_S = 120.0
_READ_WAIT_S = 1.0


class State(Enum):
    """What a file is to the installed MLflow."""

    MISSING = "missing or empty"
    CURRENT = "of the installed version"
    OLDER = "of an older MLflow"
    HALF_MADE = "left by a process that was killed while MLflow created it"
    BUSY = "locked by another process"


def sqlite_uri(path: Path, query: str = "", kind: str = "sqlite") -> str:
    """Return the URI of a database file, percent-encoded where the path has a meaning in URIs."""
    return f"{kind}:///{_ENCODED.sub(lambda found: quote(found[0]), str(path))}{query}"


def database_file(uri: str) -> Path | None:
    """Return the file of a sqlite URI from `absolute_uri`, or None for any other store."""
    return Path(unquote(uri.partition(":///")[2].partition("?")[0])) if uri.startswith("sqlite") else None


def uri_of_mlflow(uri: str) -> str:
    """Return the URI to give to MLflow: over a link without such characters, if the file's path has any.

    SQLAlchemy 2.1 decodes a path, 2.0 does not, and MLflow creates the folders of the path as it stands in the URI.
    """
    path = database_file(uri)
    if path is None or not _ENCODED.search(str(path)):
        return uri
    return f"sqlite:///{_link_to(path)}{''.join(uri.partition('?')[1:])}"


def uri_of_artifacts(place: str) -> str:
    """Return an experiment's artifact location for MLflow: a path with such characters as a URI."""
    return Path(place).as_uri() if "://" not in place and _ENCODED.search(place) else place


@functools.cache
def _link_to(path: Path) -> Path:
    link = folder_until_exit() / "mlflow.db"
    link.symlink_to(path)
    return link


def check_database(path: Path) -> State:
    """Return the state of a database file without importing MLflow.

    Raises:
        UserError: the path is not that of a file, or the file is not MLflow's or is of a newer version.
    """
    _check_kind(path)
    if not path.exists() or not path.stat().st_size:
        return State.MISSING
    try:
        with opened(path, _READ_WAIT_S) as database:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            revisions = _revisions(database) if "alembic_version" in tables else []
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            return State.BUSY
        raise UserError(f"{path} cannot be read ({error}): {_ELSEWHERE}") from error
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} is not a sqlite database ({error}): {_ELSEWHERE}") from error
    if not tables:
        return State.MISSING
    if "experiments" not in tables:
        raise UserError(f"{path} is a database of another program: {_ELSEWHERE}")
    if not revisions:
        return State.HALF_MADE
    known = _migrations()
    if known and not known.keys() >= set(revisions):
        raise UserError(
            f"the database {path} was written by a newer MLflow than the installed {version('mlflow')}: "
            f"upgrade mlflow, or {_ELSEWHERE}"
        )
    newest = known.keys() - set(known.values())
    return State.CURRENT if not known or newest <= set(revisions) else State.OLDER


def _half_made(path: Path) -> str:
    """Return the sentence about a database whose creation or migration was interrupted."""
    aside = shlex.join(["mv", str(path), f"{path}.broken"])
    return (
        f"the database {path} is half made, because a process was killed while MLflow created or migrated it: move it "
        f"away with: {aside}, then store its sweeps again with: attn-exp log 'SWEEP'"
    )


def prepare_database(uri: str, upgrade: str = "copy") -> str | None:
    """Create the database of a sqlite URI, or upgrade one of an older MLflow; imports MLflow if it does either.

    Processes that call this at the same time wait for each other. An upgraded database keeps its old version beside
    it, under a name with its revision.

    Args:
        uri: from `absolute_uri`.
        upgrade: `copy`, or `refuse` to leave an older database as it is.

    Returns:
        A sentence if the database was upgraded.

    Raises:
        UserError: see `check_database`; it is older and may not be upgraded; or its upgrade fails.
    """
    if (named := database_file(uri)) is None or check_database(named) in (State.CURRENT, State.BUSY):
        return None
    path = named.resolve()  # a link stays one
    with _locked(path):
        state = check_database(path)  # another process may have done it meanwhile
        if state is State.MISSING:
            with _beside(path) as new:
                _migrate(new, path)
        check_usable(path, state, upgrade)
        if state is State.OLDER:
            return _upgrade(path)
    return None


def check_usable(path: Path, state: State, upgrade: str) -> None:
    """Raise UserError if a database of this state is half made, or has to be upgraded and may not be."""
    if state is State.HALF_MADE:
        raise UserError(_half_made(path))
    if state is State.OLDER and upgrade == "refuse":
        raise UserError(
            f"the database {path} is of an older MLflow than the installed {version('mlflow')}: allow "
            f"tracker.upgrade=copy, which keeps the old one beside it, or {_ELSEWHERE}"
        )


def _upgrade(path: Path) -> str:
    with opened(path, _READ_WAIT_S) as database:
        (revision, *_) = _revisions(database)
    old = path.with_name(f"{path.name}.{revision}")
    with _beside(path) as new:
        with opened(path, _READ_WAIT_S) as source, contextlib.closing(sqlite3.connect(new)) as target:
            source.backup(target)
        try:
            _migrate(new, path)
        except Exception as error:
            if disk_trouble(error) is not None:
                raise
            raise UserError(f"{_half_made(path)} ({str(error).splitlines()[0][:100]})") from error
        shutil.copymode(path, new)
        shutil.copy2(path, old)
    return f"{path} was of an older MLflow and is upgraded; its old version is {old}"


def _migrate(new: Path, path: Path) -> None:
    """Let MLflow create or migrate the database `new`, which is to be `path`."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # MLflow writes this into the first experiment, which is not ours, by a statement that two kinds of quotes break.
    root = str(path.parent / "artifacts")
    if {"'", '"'} <= set(root):
        root = "artifacts"
    uri = uri_of_mlflow(sqlite_uri(new))
    try:
        with _unsynced():
            SqlAlchemyStore(uri, root)
    finally:
        # MLflow keeps it also if this fails: the next try would continue in the file that was removed.
        if (engine := SqlAlchemyStore._engine_map.pop(uri, None)) is not None:
            engine.dispose()


@contextlib.contextmanager
def _unsynced() -> Iterator[None]:
    """Let sqlite leave it to the system when it writes to the disk: for a file that nobody uses before it is whole.

    MLflow commits some hundred times, and would wait for the disk each time: 9.5 s at a load of 7, where 3.0 s are its
    own.
    """
    from sqlalchemy import Engine, event

    def set_up(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", set_up)
    try:
        yield
    finally:
        event.remove(Engine, "connect", set_up)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        with FileLock(f"{path}.lock", timeout=_LOCK_WAIT_S):
            yield
    except Timeout as error:
        raise UserError(f"{path}.lock is held by another process that creates {path}: {_ELSEWHERE}") from error


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a new name beside `path`, whose file takes the name `path` in the end. Holders of the lock only."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # of a process that was killed
    _remove_journals(new)
    try:
        yield new
    except Exception:
        new.unlink(missing_ok=True)  # where the disk is full, others need its room
        _remove_journals(new)
        raise
    with new.open("rb") as file:
        os.fsync(file.fileno())
    # sqlite would write an earlier file's journal into the new one: https://sqlite.org/howtocorrupt.html, 1.4.
    _remove_journals(path)
    os.replace(new, path)


def _remove_journals(path: Path) -> None:
    for end in ("-journal", "-wal", "-shm"):
        path.with_name(f"{path.name}{end}").unlink(missing_ok=True)


def _check_kind(path: Path) -> None:
    """Raise UserError unless the path can be a database's: opening a pipe or a device would wait for ever."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a link to {os.readlink(path)}, which does not exist: {_ELSEWHERE}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {_ELSEWHERE}") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a file"
        raise UserError(f"{path} is {what}: {_ELSEWHERE}")


@contextlib.contextmanager
def opened(path: Path, wait_s: float) -> Iterator[sqlite3.Connection]:
    """Yield a connection that reads an existing database, and waits this long for processes that write.

    A process that is killed while it writes leaves a journal, with which the next connection restores the file. One
    that was opened as read-only may not, and fails (SQLITE_READONLY_ROLLBACK, https://sqlite.org/rescode.html).
    """
    uri = f"file:{quote(str(path))}?mode=rw"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=wait_s)) as database:
        database.execute("PRAGMA query_only = ON")
        yield database


def _revisions(database: sqlite3.Connection) -> list[str]:
    return [row[0] for row in database.execute("SELECT version_num FROM alembic_version")]


@functools.cache
def _migrations() -> dict[str, str]:
    """Return the installed MLflow's schema revisions, each with the one before it; empty if its files are not there."""
    spec = importlib.util.find_spec("mlflow")
    known: dict[str, str] = {}
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in Path(folder, "store/db_migrations/versions").glob("*.py"):
            found = dict(_REVISION.findall(file.read_text(encoding="utf-8")))
            if "" in found:
                known[found[""]] = found.get("down_", "")
    return known
