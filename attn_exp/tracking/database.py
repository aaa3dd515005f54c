"""MLflow's sqlite database as a file: whether the installed MLflow can use it, and how it is created.

MLflow creates a database statement by statement, so a process that is killed meanwhile leaves one that no MLflow opens
again. Here that happens in a temporary folder, and the whole file is put in its place.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import sqlite3
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from attn_exp.core.errors import UserError
from attn_exp.core.files import temporary_folder, write_whole
from attn_exp.core.host.lacking import hold
from attn_exp.tracking.client import silence

_ELSEWHERE = "choose another database with tracker.uri=sqlite:///..."
_REVISION = re.compile(r"^(down_)?revision\b[^=\n]*= *['\"](\w+)['\"]", re.MULTILINE)
# A process that creates a database holds the lock for seconds.
_LOCK_WAIT_S = 60.0
_READ_WAIT_S = 1.0


def database_file(uri: str) -> Path | None:
    """Return the file of a sqlite URI from `absolute_uri`, or None for any other store."""
    return Path(uri.partition(":///")[2].partition("?")[0]) if uri.startswith("sqlite") else None


def check_database(path: Path) -> bool:
    """Return whether there is a database, without importing MLflow.

    Raises UserError if the file is not MLflow's, or of another version of it.
    """
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a link to {os.readlink(path)}, where nothing is: mount that, or {_ELSEWHERE}")
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return False
    try:
        # Not read-only: a killed writer leaves a journal, with which a connection that may write restores the file.
        place = f"file:{quote(str(path))}?mode=rw"
        with contextlib.closing(sqlite3.connect(place, uri=True, timeout=_READ_WAIT_S)) as database:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {"experiments", "alembic_version"} <= tables:
                raise UserError(f"{path} is a database of another program: {_ELSEWHERE}")
            revisions = {row[0] for row in database.execute("SELECT version_num FROM alembic_version")}
    except sqlite3.Error as error:
        if "locked" in str(error):
            return True
        raise UserError(f"{path} is not a sqlite database that can be read ({error}): {_ELSEWHERE}") from error
    known = _revisions()
    if not revisions <= known.keys():
        raise UserError(
            f"the database {path} was written by a newer MLflow than the installed {version('mlflow')}: "
            f"upgrade mlflow, or {_ELSEWHERE}"
        )
    if revisions != known.keys() - known.values():
        upgrade = shlex.join(["mlflow", "db", "upgrade", f"sqlite:///{path}"])
        raise UserError(
            f"the database {path} is of an older MLflow than the installed {version('mlflow')}: copy it, then upgrade "
            f"it with: {upgrade}, or {_ELSEWHERE}"
        )
    return True


def prepare_database(path: Path) -> None:
    """Create a database, unless it exists; imports MLflow. Processes that do this wait for each other.

    Raises:
        UserError: see `check_database`.
    """
    if check_database(path):
        return
    silence()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with hold(Path(f"{path}.lock"), _LOCK_WAIT_S), temporary_folder() as folder:
        if not check_database(path):  # another process may have created it meanwhile
            new = folder / "mlflow.db"
            SqlAlchemyStore(f"sqlite:///{new}", str(path.parent / "artifacts")).engine.dispose()
            write_whole(path, new.read_bytes())


def _revisions() -> dict[str, str]:
    """Return the revisions of the installed MLflow's schema, each with the one before it."""
    spec = importlib.util.find_spec("mlflow")
    known: dict[str, str] = {}
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in Path(folder, "store/db_migrations/versions").glob("*.py"):
            found = dict(_REVISION.findall(file.read_text(encoding="utf-8")))
            if "" in found:
                known[found[""]] = found.get("down_", "")
    return known
