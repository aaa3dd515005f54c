"""Location of an MLflow store, checked without importing MLflow and without contacting a server."""

import os
import re
import shlex
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from attn_exp.core.errors import UserError
from attn_exp.core.redaction import has_password, redacted
from attn_exp.results.there import HOME
from attn_exp.tracking.database import State, check_database, check_usable, database_file, sqlite_uri


def replay_command(folder: Path, uri: str, experiment: str, artifacts: str | None) -> str:
    """Return the command that stores the sweep in `folder` later, with a note on passwords instead of them."""
    words = ["attn-exp", "log", _typed(folder)]
    if uri != absolute_uri(DEFAULT_URI):
        words.append(f"uri={redacted(uri)}")
    if experiment != "attn_exp":
        words.append(f"mlflow_experiment={experiment}")
    if artifacts != artifacts_place(None, uri):
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


DEFAULT_URI = "sqlite:///mlruns/mlflow.db"
_SERVERS = ("http", "https")
DATABASES = ("postgresql", "mysql", "mssql")
_QUERY = re.compile(r"\w+=[^/&]*(&\w+=[^/&]*)*")
_EXAMPLE = "write tracker.uri=http://HOST:5000"


def absolute_uri(uri: str) -> str:
    """Return the URI with an absolute sqlite path, because a relative one depends on the current folder.

    Raises:
        UserError: MLflow has no store for this URI.
    """
    kind, _, rest = uri.partition("://")
    scheme = kind.split("+")[0] if rest else urlsplit(uri).scheme
    shown = redacted(uri)
    if scheme == "sqlite":
        name, question, query = rest.removeprefix("/").partition("?")
        if not rest.startswith("/") or name in ("", ":memory:"):
            raise UserError(f"tracker.uri={shown} names no database file: use tracker.uri={DEFAULT_URI}")
        if "\0" in unquote(name):
            raise UserError(f"tracker.uri={shown} names a file that cannot be (%00): use tracker.uri={DEFAULT_URI}")
        if question and not _QUERY.fullmatch(query):
            raise UserError(f"tracker.uri={shown} has a ? in its path, where a URI's path ends: write %3F")
        return sqlite_uri(Path(unquote(name)).absolute(), f"{question}{query}", kind)
    if rest and scheme in (*_SERVERS, *DATABASES):
        if re.search(r"\s", uri):
            # The address is not shown, because the end of a password in it cannot be recognised.
            raise UserError("tracker.uri has a blank in it: write %20, in a password too")
        _check_host(uri, shown)
        return uri.rstrip("/") if scheme in _SERVERS else uri
    if scheme in _SERVERS:
        raise UserError(f"tracker.uri={shown} names no server: {_EXAMPLE}")
    if re.fullmatch(r"[\w.-]+:\d{1,5}(/.*)?", uri):
        raise UserError(f"tracker.uri={shown} is not an address: write tracker.uri=http://{shown}")
    if scheme in ("", "file"):
        raise UserError(
            f"tracker.uri={shown} is a folder, which MLflow no longer supports: use tracker.uri={DEFAULT_URI}"
        )
    known = ", ".join(("sqlite", *_SERVERS, *DATABASES))
    raise UserError(f"tracker.uri={shown} is not one of {known}: use tracker.uri={DEFAULT_URI}")


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
    """Return where a new experiment's artifacts are stored, or None if a server decides that.

    Raises:
        UserError: the address contains a password, which MLflow would show to everybody.
    """
    place = given or "mlruns/artifacts"
    if "://" in place:
        if has_password(place):
            raise UserError(
                f"tracker.artifacts={redacted(place)} had a password, which MLflow would show to everybody: "
                "leave it out, and give it as the store's own variables, such as AWS_ACCESS_KEY_ID"
            )
        return place
    # A path on this machine means nothing to a server.
    return None if is_server(uri) else str(Path(place).absolute())


def check_writable(uri: str, artifacts: str | None, upgrade: str) -> State | None:
    """Create the folders of a local store, and check that they and the database can be written.

    Returns:
        The state of a database file, None for any other store.

    Raises:
        UserError: something cannot be created, written or read, or the database is not one to write into; `upgrade`
            as in `prepare_database`.
    """
    path, state = database_file(uri), None
    if path is not None:
        _make_writable(path.parent, "tracker.uri=sqlite:///FOLDER/mlflow.db")
        state = check_database(path)
        if state is not State.MISSING and not os.access(path, os.W_OK):
            raise UserError(f"{path} cannot be written: choose another database with tracker.uri=sqlite:///...")
        check_usable(path, state, upgrade)
    if artifacts is not None and "://" not in artifacts:
        _make_writable(Path(artifacts), "tracker.artifacts=FOLDER")
    return state


def _check_host(uri: str, shown: str) -> None:
    try:
        parts = urlsplit(uri)
        named = bool(parts.hostname)
        _ = parts.port
    except ValueError:
        named = False
    if not named:
        raise UserError(f"tracker.uri={shown} names no host and port: {_EXAMPLE}")


def _make_writable(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created ({error.strerror}): choose another with {option}") from error
    try:
        # Tested by writing, because on some file systems permissions do not tell.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another with {option}") from error
