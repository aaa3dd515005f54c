"""A job's run in MLflow: params, metrics, tags and files of one record, stored in one go."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.litter import owner_mark
from attn_exp.names import is_inside
from attn_exp.record import FILE_NAME, LOG_NAME, REQUEST_NAME, Record
from attn_exp.trackers.base import metrics, params, run_name, samples_csv, tags
from attn_exp.trackers.client import METRICS_BATCH, PARAM_LENGTH, PARAMS_BATCH, legal, whole_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_FILES = (FILE_NAME, REQUEST_NAME, LOG_NAME)
_FINE = ("ok", "unsupported", "unavailable")


class ArtifactError(RuntimeError):
    """The store took the numbers, and not the files."""


def create_job_run(client: "MlflowClient", experiment: str, parent: str, record: Record, folder: Path) -> str:
    """Store a record, with the files in its job's folder, as a run that is ended; its id."""

    def fill(run: "Run") -> None:
        _log_batches(client, run.info.run_id, record)
        _log_files(client, run, record, folder)

    status = "FINISHED" if record.status in _FINE else "FAILED"
    own = tags(record) | {"mlflow.parentRunId": parent}
    return whole_run(client, experiment, run_name(record), own, (record.started_at, record.finished_at), status, fill)


def _log_batches(client: "MlflowClient", run: str, record: Record) -> None:
    from mlflow.entities import Metric, Param

    moment_ms = int(record.finished_at * 1000)
    of_metrics = [Metric(legal(key), value, moment_ms, 0) for key, value in metrics(record).items()]
    of_params = [Param(legal(key), value[:PARAM_LENGTH]) for key, value in params(record).items()]
    while of_metrics or of_params:
        client.log_batch(run, of_metrics[:METRICS_BATCH], of_params[:PARAMS_BATCH])
        of_metrics, of_params = of_metrics[METRICS_BATCH:], of_params[PARAMS_BATCH:]


def _log_files(client: "MlflowClient", run: "Run", record: Record, folder: Path) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with tempfile.TemporaryDirectory(prefix=f"attn_exp_{owner_mark()}") as temporary:
        profiled = [name for profile in record.profiles.values() for name in profile.files]
        for name in (*_FILES, *profiled):
            path, place = folder / name, Path(temporary, name)
            # Names in somebody's record, and links in somebody's folder, must not send a file of ours along.
            if ".." in path.parts or not path.is_file() or not is_inside(path, folder):
                continue
            if place.is_relative_to(temporary) and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(path.absolute())
        Path(temporary, "samples.csv").write_text(samples_csv(record))
        try:
            # Not the client's own way, which asks the store for the run that it has just made: a tenth of a job's cost.
            get_artifact_repository(run.info.artifact_uri, client.tracking_uri).log_artifacts(temporary)
        except Exception as error:
            raise ArtifactError(str(error)) from error
