"""Location of an MLflow store, checked without importing MLflow and without contacting a server."""

import os
import re
import shlex
import tempfile
from pathlib import Path

from attn_exp.core.errors import UserError
from attn_exp.core.redaction import has_password, redacted
from attn_exp.results.there import HOME
from attn_exp.tracking.database import check_database, database_file

DEFAULT_URI = "sqlite:///mlruns/mlflow.db"
_SERVERS = ("http", "https")
_DATABASES = ("postgresql", "mysql", "mssql")
_EXAMPLE = "write tracker.uri=http://HOST:5000"


def absolute_uri(uri: str) -> str:
    """Return the URI with an absolute sqlite path: a relative one depends on the current folder. Raises UserError."""
    kind, _, rest = uri.partition("://")
    scheme, shown = kind.split("+")[0], redacted(uri)
    if scheme == "sqlite":
        name, question, query = rest.removeprefix("/").partition("?")
        if not rest.startswith("/") or name in ("", ":memory:"):
            raise UserError(f"tracker.uri={shown} names no database file: use tracker.uri={DEFAULT_URI}")
        path = Path(name).absolute()
        if re.search(r"[%#?\x00-\x1f]", str(path)) or "/" in query:
            raise UserError(f"MLflow cannot open {path}, because of a %, # or ? in it: use another folder")
        return f"{kind}:///{path}{question}{query}"
    if rest and scheme in (*_SERVERS, *_DATABASES):
        return uri.rstrip("/") if scheme in _SERVERS else uri
    if scheme == "file" or "://" not in uri:
        raise UserError(
            f"tracker.uri={shown} is a folder, which MLflow no longer supports: use tracker.uri={DEFAULT_URI}, into "
            f"which mlflow migrate-filestore moves its runs, or {_EXAMPLE}"
        )
    known = ", ".join(("sqlite", *_SERVERS, *_DATABASES))
    raise UserError(f"tracker.uri={shown} is not one of {known}: use tracker.uri={DEFAULT_URI}")


def replay_command(folder: Path, uri: str, experiment: str, artifacts: str | None) -> str:
    """Return the command that stores the sweep in `folder` later, with a note on passwords instead of them."""
    words = ["attn-exp", "log", _typed(folder)]
    if uri != absolute_uri(DEFAULT_URI):
        words.append(f"uri={redacted(uri)}")
    if experiment != "attn_exp":
        words.append(f"mlflow_experiment={experiment}")
    if chosen(artifacts, uri):
        # The experiment may be created by then.
        words.append(f"tracker.artifacts={artifacts}")
    if not has_password(uri):
        return shlex.join(words)
    given = "in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" if is_server(uri) else "in the URI"
    return f"{shlex.join(words)} (with user and password {given})"


def _typed(folder: Path) -> str:
    """Return a sweep's folder as the command accepts it: by name if it is in the usual place."""
    folder = folder.absolute()
    if folder.parent == Path(HOME).absolute():
        return folder.name
    return f"./{folder.relative_to(Path.cwd())}" if folder.is_relative_to(Path.cwd()) else str(folder)


def option_uri(uri: str) -> str:
    """Return `absolute_uri` of what a command's option `uri=` gave, whose messages name that option."""
    try:
        return absolute_uri(uri)
    except UserError as error:
        raise UserError(str(error).replace("tracker.uri=", "uri=")) from error


def is_server(uri: str) -> bool:
    """Return whether an address is that of a tracking server, which chooses the location of artifacts itself."""
    return uri.startswith(tuple(f"{scheme}://" for scheme in _SERVERS))


def artifacts_place(given: str | None, uri: str) -> str | None:
    """Return where a new experiment's artifacts are stored, or None if a server decides that."""
    place = given or "mlruns/artifacts"
    if "://" in place:
        return place
    # A path on this machine means nothing to a server.
    return None if is_server(uri) else str(Path(place).absolute())


def chosen(artifacts: str | None, uri: str) -> bool:
    """Return whether this place of artifacts is another than the one without `tracker.artifacts`."""
    return artifacts != artifacts_place(None, uri)


def check_writable(uri: str, artifacts: str | None) -> None:
    """Create the folders of a local store; raise UserError if they or the database cannot be written."""
    if (path := database_file(uri)) is not None:
        _make_writable(path.parent, "tracker.uri=sqlite:///FOLDER/mlflow.db")
        if check_database(path) and not os.access(path, os.W_OK):
            raise UserError(f"{path} cannot be written: choose another database with tracker.uri=sqlite:///...")
    if artifacts is not None and "://" not in artifacts:
        _make_writable(Path(artifacts), "tracker.artifacts=FOLDER")


def _make_writable(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Tested by writing, because on some file systems permissions do not tell.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another with {option}") from error
