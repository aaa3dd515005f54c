"""MLflow's client as the tracker uses it: silent, names and values made valid, a run stored wholly or not at all."""

import contextlib
import getpass
import logging
import os
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from attn_exp.core.errors import UserError
from attn_exp.tracking.trouble import ArtifactError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Metric, Run

Value = TypeVar("Value")
# MLflow reads these when it is imported: print nothing, send nothing, notice a lost server within seconds, and try once
# more, not when a server says (Retry-After may be an hour).
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    # PostgreSQL's own library reads these.
    "PGCONNECT_TIMEOUT": "10",
}
# MLflow refuses larger batches and cuts longer values.
_PARAMS_BATCH, _METRICS_BATCH, _PARAM_LENGTH, TAG_LENGTH, _NAME_LENGTH = 100, 900, 6000, 8000, 240
# The tag with the name under which an experiment was created.
_CREATED_AS = "attn_exp.experiment"
# Small pages, because a thousand runs at once take 100 MB in the database layer.
_PAGE = 100


def silence() -> None:
    """Stop MLflow from printing and sending anything. Call this before MLflow is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # urllib3 prints each retry; the sweep's end reports what could not be stored.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def find_experiment(client: "MlflowClient", name: str) -> "Experiment | None":
    """Return the experiment that was created under this name, which somebody may have changed since.

    Raises UserError if the experiment is deleted.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        found = next(iter(client.search_experiments(filter_string=f"tags.`{_CREATED_AS}` = {quoted(name)}")), None)
    if found is not None and found.lifecycle_stage == "deleted":
        raise UserError(f"MLflow's experiment {name} is deleted: restore it, or choose another: mlflow_experiment=NAME")
    return found


def open_experiment(client: "MlflowClient", name: str, artifacts: str | None) -> "Experiment":
    """Return the experiment of this name, creating it if there is none. Raises UserError if it is deleted."""
    from mlflow.exceptions import MlflowException

    found = find_experiment(client, name)
    if found is None:
        try:
            return client.get_experiment(client.create_experiment(name, artifacts, tags={_CREATED_AS: name}))
        except MlflowException:
            # Another process may have created it meanwhile.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found


def moved_artifacts(found: "Experiment") -> str | None:
    """Return a sentence if the files of an experiment belong into a folder that is not there; else None.

    MLflow keeps the absolute path that was right when the experiment was created.
    """
    place = local_path(str(found.artifact_location or ""))
    if place is None or place.is_dir():
        return None
    return (
        f"MLflow's experiment {found.name} has its files in {place}, which is not there: if its folder was moved, "
        "links to files of earlier runs are broken, and new files are written to that path"
    )


def local_path(place: str) -> Path | None:
    """Return the folder of this machine that an artifact location names; None if it is elsewhere."""
    parts = urlsplit(place)
    if parts.scheme not in ("", "file") or not parts.path:
        return None
    return Path(unquote(parts.path) if parts.scheme else place)


class AnsweringClient:
    """MLflow's client, which calls `answered` after each request.

    A distant server is slow for a run of many requests, and not for any of them.
    """

    def __init__(self, client: "MlflowClient", answered: Callable[[], None]) -> None:
        self._client, self._answered = client, answered

    def __getattr__(self, name: str) -> Callable[..., Any]:
        request = getattr(self._client, name)

        def asked(*arguments: Any, **options: Any) -> Any:
            answer = request(*arguments, **options)
            self._answered()
            return answer

        return asked


def search(client: "MlflowClient", experiment: str, wanted: Mapping[str, str]) -> "list[Run]":
    """Return all active runs that have these tags, the newest first."""
    condition = " and ".join(f"tags.`{key}` = {quoted(value)}" for key, value in wanted.items())
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment], condition, max_results=_PAGE, page_token=token)
        runs += page
        token = page.token
        if not token:
            return runs


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A run to store, of which names and values are made valid when it is stored.

    Attributes:
        parent: the run above it.
        moments: the start and end of the run in seconds since 1970; 0 means now.
        metrics: the values of its metrics.
        status: `FINISHED` or `FAILED`.
        files: its files, each with the folder of its artifacts in which it is stored; None is the topmost.
    """

    name: str
    parent: str
    moments: tuple[float, float]
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: "Sequence[Metric]"
    status: str = "FINISHED"
    files: Mapping[Path, str | None] = field(default_factory=dict)


def store_run(client: "MlflowClient", experiment: str, new: NewRun) -> str:
    """Store a run in an experiment, and return its id; after an exception there is none."""
    began_ms, ended_ms = (int(moment * 1000) or None for moment in new.moments)
    tags = fitting({**new.tags, "mlflow.parentRunId": new.parent}) | source()
    run = str(client.create_run(experiment, began_ms, tags, new.name).info.run_id)
    try:
        log_values(client, run, new.metrics, params=new.params)
        store_files(client, run, new.files)
        client.set_terminated(run, new.status, ended_ms)
    except Exception:
        with contextlib.suppress(Exception):
            client.delete_run(run)
        raise
    return run


def store_files(client: "MlflowClient", run: str, files: Mapping[Path, str | None]) -> None:
    """Store files of a run, each in a folder of its artifacts, as in `NewRun.files`. Raises ArtifactError."""
    for file, place in files.items():
        try:
            client.log_artifact(run, str(file), place)
        except Exception as error:
            raise ArtifactError(str(error)) from error


def log_values(
    client: "MlflowClient",
    run: str,
    metrics: "Sequence[Metric]",
    tags: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
) -> None:
    """Store metrics, tags and parameters of a run, in as many batches as MLflow needs."""
    from mlflow.entities import Param, RunTag

    new_tags = [RunTag(key, value) for key, value in fitting(tags or {}).items()]
    new_params = [Param(key, value[:_PARAM_LENGTH]) for key, value in legal(params or {}).items()]
    while metrics or new_params or new_tags:
        client.log_batch(run, metrics[:_METRICS_BATCH], new_params[:_PARAMS_BATCH], new_tags)
        metrics, new_params, new_tags = metrics[_METRICS_BATCH:], new_params[_PARAMS_BATCH:], []


def source() -> dict[str, str]:
    """Return the tags that MLflow shows as a run's source and user."""
    own = {"mlflow.source.name": "attn_exp", "mlflow.source.type": "LOCAL"}
    # The system may not know the user's name: a container with a numeric user.
    with contextlib.suppress(KeyError, OSError, ImportError):
        own["mlflow.user"] = getpass.getuser()
    return own


def legal(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return values under names that MLflow accepts, each under a name of its own.

    Names have letters, digits and `_-.: /`, are paths in their shortest form, and have at most 250 characters
    (mlflow/utils/validation.py).
    """
    found: dict[str, Value] = {}
    # Those that are accepted keep their names.
    for key in sorted(values, key=lambda value: _legal(value) != value):
        name = _legal(key)
        other = 2
        while name in found:
            name, other = f"{_legal(key)}_{other}", other + 1
        found[name] = values[key]
    return found


def _legal(key: str) -> str:
    path = posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", key)).strip("/")
    return re.sub(r"^\.+", "_", path)[:_NAME_LENGTH] or "_"


def fitting(values: Mapping[str, str]) -> dict[str, str]:
    """Return tags with names and lengths that MLflow accepts."""
    return legal({key: value[:TAG_LENGTH] for key, value in values.items()})


def quoted(value: str) -> str:
    """Return a value quoted for MLflow's filters."""
    mark = '"' if "'" in value else "'"
    return f"{mark}{value}{mark}"
