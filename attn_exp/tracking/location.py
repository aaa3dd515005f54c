"""Location of an MLflow store, checked without importing MLflow and without contacting a server."""

import math
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError
from attn_exp.core.redaction import has_password, redacted
from attn_exp.results.there import HOME
from attn_exp.tracking.database import check_database, database_file

DEFAULT_URI = "sqlite:///mlruns/mlflow.db"
_ARTIFACTS = "mlruns/artifacts"
_SERVERS = ("http", "https")
_DATABASES = ("postgresql", "mysql", "mssql")
# How long a sweep waits for one answer of a store, unless `tracker.patience_s` says so: at its start, and once more at
# its end.
_PATIENCE_S = 10.0
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


class MlflowPlace:
    """The store that a configuration's `tracker` describes. Raises UserError if that is invalid."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.uri = absolute_uri(str(config.get("uri") or DEFAULT_URI))
        self.experiment = str(config.get("mlflow_experiment") or "attn_exp")
        given = str(config.get("artifacts") or _ARTIFACTS)
        # A path on this machine means nothing to a server, which chooses the place of artifacts itself.
        usual, own = (None if is_server(self.uri) else str(Path(place).absolute()) for place in (_ARTIFACTS, given))
        self.artifacts = given if "://" in given else own
        # Whether they are at another place than without `tracker.artifacts`.
        self.elsewhere = self.artifacts != usual
        patience_s = _PATIENCE_S if config.get("patience_s") is None else config["patience_s"]
        if isinstance(patience_s, bool) or not isinstance(patience_s, int | float) or not 0 <= patience_s < math.inf:
            raise UserError(f"tracker.patience_s={patience_s} is not a number of seconds: write tracker.patience_s=30")
        self.patience_s = float(patience_s)

    @property
    def shown(self) -> str:
        """The address without user and password."""
        return redacted(self.uri)

    def check(self) -> None:
        """Create the folders of a local store; raise UserError if they or the database cannot be written."""
        if (path := database_file(self.uri)) is not None:
            _make_writable(path.parent, "tracker.uri=sqlite:///FOLDER/mlflow.db")
            if check_database(path) and not os.access(path, os.W_OK):
                raise UserError(f"{path} cannot be written: choose another database with tracker.uri=sqlite:///...")
        if self.artifacts is not None and "://" not in self.artifacts:
            _make_writable(Path(self.artifacts), "tracker.artifacts=FOLDER")

    def replay_command(self, folder: Path) -> str:
        """Return the command that stores the sweep in `folder` later, with a note on passwords instead of them."""
        words = ["attn-exp", "log", _typed(folder)]
        if self.uri != absolute_uri(DEFAULT_URI):
            words.append(f"uri={self.shown}")
        if self.experiment != "attn_exp":
            words.append(f"mlflow_experiment={self.experiment}")
        if self.elsewhere:
            # The experiment may be created by then.
            words.append(f"tracker.artifacts={self.artifacts}")
        if not has_password(self.uri):
            return shlex.join(words)
        given = "in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" if is_server(self.uri) else "in the URI"
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


def _make_writable(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Tested by writing, because on some file systems permissions do not tell.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another with {option}") from error
