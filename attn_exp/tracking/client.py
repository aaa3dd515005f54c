"""MLflow's client as all of the tracker uses it: silent, its names and values made to fit, runs whole or not at all."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attn_exp.tracking.base import user_name
from attn_exp.tracking.location import DATABASES

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# Read by MLflow when it is imported: nothing printed, nothing sent, and a lost server noticed within seconds.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    # Read by PostgreSQL's own library.
    "PGCONNECT_TIMEOUT": "10",
}
# How often MLflow tries to reach a database server before it says that it cannot. Its own ten tries take 100 s, and a
# sweep on a CPU waits for each.
_DATABASE_TRIES = 2
# Beyond these MLflow refuses a batch or cuts a value.
PARAMS_BATCH, METRICS_BATCH, PARAM_LENGTH = 100, 900, 6000
_TAG_LENGTH = 8000
# Small pages: a thousand runs at once take 100 MB on their way through the database layer.
_PAGE = 100


def silence() -> None:
    """Let MLflow print and send nothing; before it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # It prints each retry; what could not be stored is told when the sweep is closed.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def client_of(uri: str) -> "MlflowClient":
    """The client of a store. It notices within a second that a database server is gone."""
    from mlflow import MlflowClient

    if uri.startswith(DATABASES):
        from mlflow.store.db import utils

        # A constant of mlflow 3.13 to 3.17.
        utils.MAX_RETRY_COUNT = _DATABASE_TRIES
    return MlflowClient(tracking_uri=uri)


def open_experiment(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    """The id of the experiment of this name, made if there is none."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=artifacts)
        except MlflowException:
            # Another process may have made it meanwhile.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise RuntimeError(f"experiment {name} is deleted there: restore it, or choose another")
    return str(found.experiment_id)


def search(client: "MlflowClient", experiment: str, wanted: Mapping[str, str]) -> "list[Run]":
    """All live runs that have these tags, the newest first."""
    condition = " and ".join(f"tags.`{key}` = {quoted(value)}" for key, value in wanted.items())
    found: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment], condition, max_results=_PAGE, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def whole_run(
    client: "MlflowClient",
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    moments: tuple[float, float],
    status: str,
    fill: Callable[["Run"], None],
) -> str:
    """Make a run, let `fill` store what belongs into it, and end it; it is deleted if any of that fails.

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
    """The tags that MLflow shows as a run's source and user."""
    user = user_name()
    return {"mlflow.source.name": "attn_exp"} | ({"mlflow.user": user} if user else {})


def legal(key: str) -> str:
    """A key with the characters alone that MLflow takes in names."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def fitting(values: Mapping[str, str]) -> dict[str, str]:
    """Tags under names that MLflow takes, no longer than it takes them."""
    return {legal(key): value[:_TAG_LENGTH] for key, value in values.items()}


def quoted(value: str) -> str:
    """A value as MLflow's filters take it."""
    mark = '"' if "'" in value else "'"
    return f"{mark}{value}{mark}"
