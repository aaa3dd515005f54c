"""MLflow's sqlite file: what it may be, how it is created and upgraded, and the names that its folder may have."""

import contextlib
import errno
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cli
import pytest
from filelock import FileLock
from test_tracker_mlflow import a_record
from test_tracking_patience import LIMIT_S, PATIENCE_S, six_jobs

import attn_exp.tracking.database as database_module
from attn_exp.core.errors import UserError
from attn_exp.core.record_file import write_record
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.client import silence
from attn_exp.tracking.database import State, check_database, database_file, prepare_database, sqlite_uri
from attn_exp.tracking.location import absolute_uri
from attn_exp.tracking.mlflow_read import check_sweep, read_run, read_store
from attn_exp.tracking.runs import jobs_in_database
from attn_exp.tracking.trouble import ArtifactError, trouble


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database that MLflow has set up once, since that takes a second."""
    silence()
    path = tmp_path_factory.mktemp("made") / "mlflow.db"
    assert prepare_database(sqlite_uri(path)) is None
    assert sorted(file.name for file in path.parent.iterdir()) == ["mlflow.db", "mlflow.db.lock"]
    return path.read_bytes()


def older(path: Path) -> str:
    """Create a database as an MLflow of some revisions ago left it, with one experiment; return its revision."""
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils
    from mlflow.store.db.utils import InitialBase, create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(f"sqlite:///{path}")
    config = utils._get_alembic_config(f"sqlite:///{path}")
    revisions = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    InitialBase.metadata.create_all(engine)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revisions[6])
    with engine.begin() as connection:
        insert = "INSERT INTO experiments (name, artifact_location, lifecycle_stage) VALUES ('mine', '/x', 'active')"
        connection.exec_driver_sql(insert)
    engine.dispose()
    return str(revisions[6])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to("nowhere/x.db"), "is a link to nowhere/x.db, which does not exist: choose"),
        (lambda path: path.mkdir(), "is a folder: choose another database"),
        (os.mkfifo, "is not a file: choose another database"),
        (lambda path: path.write_text("not this" * 100), "is not a sqlite database"),
        (lambda path: sqlite3.connect(path).execute("CREATE TABLE mine (x)"), "is a database of another program"),
        (
            lambda path: sqlite3.connect(path).executescript(
                "CREATE TABLE alembic_version (version_num); CREATE TABLE mine (x);"
                "INSERT INTO alembic_version VALUES ('0123456789ab')"
            ),
            "is a database of another program",
        ),
        (
            lambda path: sqlite3.connect(path).execute("CREATE TABLE experiments (x)"),
            r"is half made, because a process was killed .*: mv \S+mlflow.db \S+mlflow.db.broken, then store its",
        ),
    ],
    ids=["link", "folder", "pipe", "text", "foreign", "foreign_alembic", "half_made"],
)
def test_what_is_no_database_is_refused_at_once_and_stays_as_it_is(make: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    make(path)  # type: ignore[operator]
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(UserError, match=said):
        make_tracker({"name": "mlflow", "uri": sqlite_uri(path)}).open(SweepInfo("first", tmp_path, ""))
    assert before is None or path.read_bytes() == before


def test_a_killed_creation_leaves_nothing_and_the_next_one_creates_it(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    code = f"""
        import os, signal
        from pathlib import Path
        from attn_exp.tracking import database
        from attn_exp.tracking.client import silence
        silence()
        from sqlalchemy import Engine, event
        statements = []
        @event.listens_for(Engine, "after_cursor_execute")
        def die(*_):
            statements.append(1)
            if len(statements) == 150:
                os.kill(os.getpid(), signal.SIGKILL)
        database.prepare_database({sqlite_uri(path)!r})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=cli.environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    left = {file.name for file in tmp_path.iterdir()}
    assert ".mlflow.db.new" in left and "mlflow.db" not in left
    assert check_database(path) is State.MISSING
    assert prepare_database(sqlite_uri(path)) is None
    assert check_database(path) is State.CURRENT
    assert {file.name for file in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


@contextlib.contextmanager
def locked(path: Path, how: str) -> Iterator[None]:
    """Lock a database against all others (`EXCLUSIVE`), or those that write (`IMMEDIATE`)."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"BEGIN {how}")
        yield


def test_a_sweep_waits_for_a_sick_file_no_longer_than_its_patience(
    made: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, because what each takes is waiting."""
    homes = {kind: tmp_path / kind for kind in ("locked", "written", "hanging", "creating")}
    for kind, home in homes.items():
        home.mkdir()
        if kind != "creating":
            (home / "mlflow.db").write_bytes(made)
    freed, look = threading.Event(), database_module.check_database

    def hanging(path: Path) -> State:
        if path.parent == homes["hanging"]:
            freed.wait(60)
        return look(path)

    monkeypatch.setattr("attn_exp.tracking.database.check_database", hanging)
    monkeypatch.setattr("attn_exp.tracking.location.check_database", hanging)
    # More than the patience, and the thread has ended when the next test creates a database.
    monkeypatch.setattr("attn_exp.tracking.database._LOCK_WAIT_S", 2 * PATIENCE_S)
    with FileLock(f"{homes['creating']}/mlflow.db.lock"):
        with (
            locked(homes["locked"] / "mlflow.db", "EXCLUSIVE"),
            locked(homes["written"] / "mlflow.db", "IMMEDIATE"),
            ThreadPoolExecutor(len(homes)) as pool,
        ):
            sweep = lambda home: six_jobs(sqlite_uri(home / "mlflow.db"), home)  # noqa: E731
            swept = dict(zip(homes, pool.map(sweep, homes.values()), strict=True))
        freed.set()
        for thread in threading.enumerate():
            if thread.name == "mlflow":
                thread.join()
    for kind, (took_s, warning, lacks) in swept.items():
        assert lacks is not None and "lacks 6 records" in lacks and "attn-exp log" in lacks, (kind, lacks)
        assert took_s < LIMIT_S, (kind, took_s, warning, lacks)
    assert swept["hanging"][1] is not None
    assert re.search(r"stores nothing yet \(no answer within \d+ s\)", swept["hanging"][1])


def leave_killed(database: bytes, path: Path) -> None:
    """Write a database as a process leaves it that is killed in the middle of a transaction: with a hot journal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    live = path.with_name("live.db")
    live.write_bytes(database)
    with contextlib.closing(sqlite3.connect(live, isolation_level=None)) as writer:
        writer.execute("PRAGMA cache_size = 1")  # so that changes reach the file before the end
        writer.execute("BEGIN")
        writer.execute("DELETE FROM experiments")
        writer.execute("CREATE TABLE filling AS SELECT zeroblob(100000)")
        for end in ("", "-journal"):
            shutil.copyfile(f"{live}{end}", f"{path}{end}")
        writer.execute("ROLLBACK")
    live.unlink()
    assert path.read_bytes() != database


@pytest.mark.parametrize(
    "read",
    [
        check_database,
        lambda path: jobs_in_database(path, "none"),
        lambda path: check_sweep(path, "Default", "first"),
        lambda path: read_store(sqlite_uri(path), "Default", ["first"]),
        lambda path: read_run(sqlite_uri(path), "none"),
    ],
    ids=["state", "jobs", "sweep", "store", "run"],
)
def test_what_a_killed_writer_left_is_restored_and_read(read: object, made: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    leave_killed(made, path)
    with contextlib.suppress(UserError):  # such as `there is no sweep 'first'`, told after reading
        read(path)  # type: ignore[operator]
    assert not path.with_name("mlflow.db-journal").exists()
    assert path.read_bytes() == made


def test_a_killed_writers_journal_is_not_written_into_a_new_database(made: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    leave_killed(made, path)
    path.unlink()
    assert prepare_database(sqlite_uri(path)) is None
    assert check_database(path) is State.CURRENT
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("SELECT name FROM experiments").fetchall() == [("Default",)]


@contextlib.contextmanager
def full_disk(pages: int) -> Iterator[None]:
    """Let databases have no more pages than so many, or than they have: sqlite says that the disk is full."""
    from sqlalchemy import Engine, event

    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    event.listen(Engine, "connect", limit)
    try:
        yield
    finally:
        event.remove(Engine, "connect", limit)


def test_a_disk_that_fills_while_a_database_is_created_is_named_each_time(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    for _ in range(2):
        with full_disk(10), pytest.raises(Exception, match="database or disk is full") as caught:
            prepare_database(sqlite_uri(path))
        assert trouble(caught.value) == "no space is left on its disk"
        assert {file.name for file in tmp_path.iterdir()} == {"mlflow.db.lock"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("(sqlite3.OperationalError) database or disk is full\n[SQL: ...]"),
            "no space is left on its disk",
        ),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), "no space is left on its disk"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "its disk takes no more of this user: a quota or a limit"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "it is read-only"),
        (sqlite3.OperationalError("disk I/O error"), "its disk can be full or broken: disk I/O error"),
        (
            ArtifactError("[('/a', '/b', '[Errno 28] No space left on device')]"),
            "its artifact store: no space is left on its disk",
        ),
        (RuntimeError("UNIQUE failed\n[parameters: ('database or disk is full',)]"), "UNIQUE failed"),
    ],
    ids=["sqlite", "file", "quota", "read_only", "broken", "artifacts", "quoted"],
)
def test_what_is_wrong_with_a_disk_is_said_in_words(error: Exception, said: str) -> None:
    assert trouble(error) == said


def test_a_full_disk_is_said_in_words_wherever_sqlalchemy_was_when_it_was_found() -> None:
    from sqlalchemy.exc import OperationalError

    full = OperationalError("INSERT ...", {}, sqlite3.OperationalError("database or disk is full"))
    full.add_detail("raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block")
    assert str(full).startswith("(raised as a result of")
    assert trouble(full) == "no space is left on its disk"


def test_an_older_database_is_upgraded_beside_a_copy_or_refused_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    revision = older(path)
    assert check_database(path) is State.OLDER
    config = {"name": "mlflow", "uri": sqlite_uri(path), "artifacts": str(tmp_path / "artifacts")}
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"is of an older MLflow than .*: allow tracker\.upgrade=copy, which keeps"):
        make_tracker(config | {"upgrade": "refuse"}).open(SweepInfo("first", tmp_path, ""))
    assert path.read_bytes() == before
    with full_disk(1):
        tracker = make_tracker(config)
        warning = tracker.open(SweepInfo("first", tmp_path, ""))
        assert warning is not None and "stores nothing yet (no space is left on its disk)" in warning
        tracker.close("FAILED", (), timeout_s=1.0)
    assert path.read_bytes() == before and not (tmp_path / ".mlflow.db.new").exists()
    tracker = make_tracker(config)
    old = path.with_name(f"mlflow.db.{revision}")
    said = f"{path} was of an older MLflow and is upgraded; its old version is {old}"
    assert tracker.open(SweepInfo("first", tmp_path, "")) == said
    assert tracker.close("FINISHED", ()) is None
    assert old.read_bytes() == before
    assert check_database(path) is State.CURRENT
    with sqlite3.connect(path) as database:
        assert {row[0] for row in database.execute("SELECT name FROM experiments")} == {"Default", "attn_exp", "mine"}


def test_a_half_migrated_database_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    older(path)
    with sqlite3.connect(path) as database:
        # What a later migration creates is there, its revision is not.
        later = {"CREATE TABLE scorers (x)", "CREATE TABLE secrets (x)", "CREATE TABLE endpoints (x)"}
        for statement in later:
            database.execute(statement.replace("TABLE", "TABLE IF NOT EXISTS"))
        database.execute("UPDATE alembic_version SET version_num = '1bd49d398cd23'")
    before = path.read_bytes()
    tracker = make_tracker({"name": "mlflow", "uri": sqlite_uri(path), "artifacts": str(tmp_path / "artifacts")})
    with pytest.raises(UserError, match=r"is half made.*attn-exp log"):
        tracker.open(SweepInfo("first", tmp_path, ""))
    assert path.read_bytes() == before


@pytest.mark.parametrize("given", ["later", 3, "", True])
def test_an_unknown_upgrade_is_refused(given: object, tmp_path: Path) -> None:
    config = {"name": "mlflow", "uri": sqlite_uri(tmp_path / "x.db"), "upgrade": given}
    if not given:
        assert make_tracker(config) is not None
        return
    with pytest.raises(UserError, match=f"tracker.upgrade={given} is not one of copy, refuse"):
        make_tracker(config)


NAMES = ("a%20b", "100%", "it's", "both'\"q", "qu?e=1", "ha#sh", "new\nline", "ünï", "sp ace", "a&b;c", "%2F", "b\\s")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_may_have_any_name(name: str, made: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / name
    (home / "mlruns").mkdir(parents=True)
    (home / "mlruns" / "mlflow.db").write_bytes(made)
    monkeypatch.chdir(home)
    assert database_file(absolute_uri("sqlite:///mlruns/mlflow.db")) == home / "mlruns" / "mlflow.db"
    tracker = make_tracker({"name": "mlflow"})
    folder = home / "multirun" / "first"
    record = a_record("one")
    (folder / record.request.job).mkdir(parents=True)
    write_record(record, folder / record.request.job)
    assert tracker.open(SweepInfo("first", folder, "")) is None
    tracker.log(record, folder / record.request.job)
    assert tracker.close("FINISHED", ()) is None
    assert [file.name for file in tmp_path.iterdir()] == [name]
    with sqlite3.connect(home / "mlruns" / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'").fetchone() == (2,)
    assert len(list(home.glob("mlruns/artifacts/*/artifacts/record.json"))) == 1


def test_a_database_is_created_in_a_folder_with_both_quotes(tmp_path: Path) -> None:
    path = tmp_path / "both'\"q" / "mlflow.db"
    path.parent.mkdir()
    assert prepare_database(sqlite_uri(path)) is None
    assert check_database(path) is State.CURRENT


def test_a_link_to_a_database_that_is_not_there_yet_stays_a_link(made: bytes, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "empty.db").touch()
    link = tmp_path / "mlflow.db"
    link.symlink_to("real/empty.db")
    assert prepare_database(sqlite_uri(link)) is None
    assert link.is_symlink()
    assert check_database(tmp_path / "real" / "empty.db") is State.CURRENT
