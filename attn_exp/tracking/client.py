"""MLflow's client as the tracker uses it: silent, names and values made valid, each run stored wholly or not at all."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from attn_exp.tracking.base import user_name
from attn_exp.tracking.database import uri_of_artifacts, uri_of_mlflow
from attn_exp.tracking.location import is_server

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

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
# How often MLflow tries to open a database. Its default of ten tries takes 100 s.
_DATABASE_TRIES = 2
# MLflow refuses larger batches and cuts longer values.
PARAMS_BATCH, METRICS_BATCH, PARAM_LENGTH, TAG_LENGTH = 100, 900, 6000, 8000
# Small pages, because a thousand runs at once take 100 MB in the database layer.
_PAGE = 100


def silence() -> None:
    """Stop MLflow from printing and sending anything. Call this before MLflow is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # urllib3 prints each retry; the sweep's end reports what could not be stored.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def client_of(uri: str) -> "MlflowClient":
    """Return the client of a store, which notices within a second that a database cannot be opened.

    A server's answers are read up to a limit.
    """
    from mlflow import MlflowClient

    if is_server(uri):
        from attn_exp.tracking.answers import limit_answers

        limit_answers()
    else:
        from mlflow.store.db import utils

        # A constant in mlflow 3.13 to 3.17.
        utils.MAX_RETRY_COUNT = _DATABASE_TRIES
    return MlflowClient(tracking_uri=uri_of_mlflow(uri))


def open_experiment(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    """Return the id of the experiment of this name, creating it if there is none."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location=artifacts and uri_of_artifacts(artifacts))
        except MlflowException:
            # Another process may have created it meanwhile.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise RuntimeError(f"experiment {name} is deleted there: restore it, or choose another")
    return str(experiment.experiment_id)


def moved_artifacts(client: "MlflowClient", experiment: str) -> str | None:
    """Return a sentence if the files of an experiment belong into a folder that is not there; else None.

    MLflow keeps the absolute path that was right when the experiment was made.
    """
    found = client.get_experiment(experiment)
    parts = urlsplit(str(found.artifact_location or ""))
    if parts.scheme not in ("", "file") or not parts.path:
        return None
    place = Path(unquote(parts.path) if parts.scheme else str(found.artifact_location))
    if place.is_dir():
        return None
    return (
        f"MLflow's experiment {found.name} has its files in {place}, which is not there: if its folder was moved, "
        "links to files of earlier runs are broken, and new files are written to that path"
    )


def search(
    client: "MlflowClient", experiment: str, wanted: Mapping[str, str], answered: Callable[[], None] = lambda: None
) -> "list[Run]":
    """Return all active runs that have these tags, the newest first; `answered` is called after each page of them."""
    condition = " and ".join(f"tags.`{key}` = {quoted(value)}" for key, value in wanted.items())
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment], condition, max_results=_PAGE, page_token=token)
        runs += page
        answered()
        token = page.token
        if not token:
            return runs


def whole_run(
    client: "MlflowClient",
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    moments: tuple[float, float],
    status: str,
    fill: Callable[["Run"], None],
) -> str:
    """Create a run, let `fill` store its content, and end it; delete it if any of that fails.

    `moments` are its start and end in seconds since 1970.
    """
    began_ms, ended_ms = (int(moment * 1000) or None for moment in moments)
    made = client.create_run(experiment, began_ms, fitting(tags) | source(), name)
    run = str(made.info.run_id)
    try:
        fill(made)
        client.set_terminated(run, status, ended_ms)
    except Exception:
        with contextlib.suppress(Exception):
            client.delete_run(run)
        raise
    return run


def source() -> dict[str, str]:
    """Return the tags that MLflow shows as a run's source and user."""
    user = user_name()
    return {"mlflow.source.name": "attn_exp"} | ({"mlflow.user": user} if user else {})


def legal(key: str) -> str:
    """Return a key with the characters that MLflow accepts in names."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def fitting(values: Mapping[str, str]) -> dict[str, str]:
    """Return tags with names and lengths that MLflow accepts."""
    return {legal(key): value[:TAG_LENGTH] for key, value in values.items()}


def quoted(value: str) -> str:
    """Return a value quoted for MLflow's filters."""
    mark = '"' if "'" in value else "'"
    return f"{mark}{value}{mark}"
