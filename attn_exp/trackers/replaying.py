"""Replaying: the command that stores a sweep's folder into the store that lacks some of it."""

import shlex
from pathlib import Path

from attn_exp.redaction import has_password, redacted
from attn_exp.trackers.location import DEFAULT_URI, absolute_uri, artifacts_place, is_server

HOME = "multirun"


def replay_command(folder: Path, uri: str, experiment: str, artifacts: str | None) -> str:
    """What to type here to store the sweep in `folder` later: no passwords, but a word on how to give them."""
    words = ["python", "-m", "attn_exp.log", _typed(folder)]
    if uri != absolute_uri(DEFAULT_URI):
        words.append(f"tracker.uri={redacted(uri)}")
    if experiment != "attn_exp":
        words.append(f"tracker.experiment={experiment}")
    if artifacts != artifacts_place(None, uri):
        # The experiment may be made only then.
        words.append(f"tracker.artifacts={artifacts}")
    if not has_password(uri):
        return shlex.join(words)
    given = "in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" if is_server(uri) else "in the URI"
    return f"{shlex.join(words)} (with user and password {given})"


def _typed(folder: Path) -> str:
    """A sweep's folder as the command takes it: by its name if it is where sweeps are."""
    folder = folder.absolute()
    if folder.parent == Path(HOME).absolute():
        return folder.name
    return f"./{folder.relative_to(Path.cwd())}" if folder.is_relative_to(Path.cwd()) else str(folder)
