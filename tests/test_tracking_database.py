"""MLflow's sqlite file: what it may be, how it is created, and the names that its folder may have."""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_tracker_mlflow import a_record
from test_tracking_patience import six_jobs

from attn_exp.core.errors import UserError
from attn_exp.core.record.file import write_record
from attn_exp.tracking import SweepInfo, make_tracker
from attn_exp.tracking.client import silence
from attn_exp.tracking.database import database_file, prepare_database
from attn_exp.tracking.location import absolute_uri


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that MLflow has set up once, since that takes a second."""
    silence()
    path = tmp_path_factory.mktemp("made") / "mlflow.db"
    prepare_database(path)
    assert sorted(file.name for file in path.parent.iterdir()) == ["mlflow.db", "mlflow.db.lock"]
    return path


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
        (lambda path: path.write_text("not this" * 100), "is not a sqlite database"),
        (lambda path: sqlite3.connect(path).execute("CREATE TABLE mine (x)"), "is a database of another program"),
        (
            lambda path: sqlite3.connect(path).executescript(
                "CREATE TABLE alembic_version (version_num); CREATE TABLE mine (x);"
                "INSERT INTO alembic_version VALUES ('0123456789ab')"
            ),
            "is a database of another program",
        ),
        (lambda path: path.symlink_to("/not/mounted/x.db"), "is a link to /not/mounted/x.db, where nothing is"),
    ],
    ids=["text", "foreign", "foreign_alembic", "not_mounted"],
)
def test_a_file_that_is_no_database_is_refused(make: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    make(path)  # type: ignore[operator]
    with pytest.raises(UserError, match=said):
        make_tracker({"name": "mlflow", "uri": f"sqlite:///{path}"}).open(SweepInfo("first", tmp_path, ""))


@contextlib.contextmanager
def locked(path: Path, how: str) -> Iterator[None]:
    """Lock a database against all others (`EXCLUSIVE`), or those that write (`IMMEDIATE`)."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"BEGIN {how}")
        yield


def test_a_sweep_goes_on_without_a_locked_file(made: Path, tmp_path: Path) -> None:
    """Both at once, because what each takes is waiting."""
    homes = {kind: tmp_path / kind for kind in ("EXCLUSIVE", "IMMEDIATE")}
    with contextlib.ExitStack() as stack:
        for kind, home in homes.items():
            home.mkdir()
            shutil.copyfile(made, home / "mlflow.db")
            stack.enter_context(locked(home / "mlflow.db", kind))
        pool = stack.enter_context(ThreadPoolExecutor(len(homes)))
        sweep = lambda home: six_jobs(f"sqlite:///{home}/mlflow.db", home)  # noqa: E731
        swept = dict(zip(homes, pool.map(sweep, homes.values()), strict=True))
    for kind, (_, lacks) in swept.items():
        assert lacks is not None and "lacks 6 records" in lacks and "attn-exp log" in lacks, (kind, lacks)


def test_an_older_database_is_refused_with_the_command_that_upgrades_it(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    older(path)
    with pytest.raises(UserError, match=r"is of an older MLflow than .*: mlflow db upgrade sqlite:///"):
        make_tracker({"name": "mlflow", "uri": f"sqlite:///{path}"}).open(SweepInfo("first", tmp_path, ""))


NAMES = ("it's", "both'\"q", "ünï", "sp ace", "a&b;c", "b\\s")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_may_have_an_odd_name(name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / name
    (home / "mlruns").mkdir(parents=True)
    shutil.copyfile(made, home / "mlruns" / "mlflow.db")
    monkeypatch.chdir(home)
    assert database_file(absolute_uri("sqlite:///mlruns/mlflow.db")) == home / "mlruns" / "mlflow.db"
    tracker = make_tracker({"name": "mlflow"})
    folder = home / "multirun" / "first"
    record = a_record("one")
    (folder / record.request.job).mkdir(parents=True)
    write_record(record, folder / record.request.job)
    assert tracker.open(SweepInfo("first", folder, "")) is None
    tracker.log(record, folder / record.request.job)
    assert tracker.close("FINISHED") is None
    assert [file.name for file in tmp_path.iterdir()] == [name]
    with sqlite3.connect(home / "mlruns" / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'").fetchone() == (2,)
    assert len(list(home.glob("mlruns/artifacts/*/artifacts/record.json"))) == 1
