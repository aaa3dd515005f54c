"""Read from an MLflow store the records that jobs left there as artifacts."""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.core.errors import UserError, nearest
from attn_exp.core.files import folder_until_exit, temporary_folder
from attn_exp.core.record.file import FILE_NAME
from attn_exp.core.redaction import redacted
from attn_exp.results.read import Sweep, read_files
from attn_exp.tracking.client import find_experiment, local_path, quoted, search, silence
from attn_exp.tracking.database import check_database, database_file
from attn_exp.tracking.location import option_uri
from attn_exp.tracking.page import run_page
from attn_exp.tracking.trouble import trouble
from attn_exp.tracking.view import store_view

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def read_store(uri: str, experiment: str, names: Sequence[str]) -> list[Sweep]:
    """Return the sweeps of these names in an experiment of an MLflow store.

    Raises UserError if there is no such store, experiment or sweep.
    """
    sweeps = []
    with _opened(uri, "name sweeps by their folders") as client, temporary_folder() as folder:
        number = _experiment(client, experiment)
        for name in names:
            runs = search(client, number, {"attn_exp.sweep": name, "attn_exp.kind": "job"})
            if not runs:
                _check_sweep(client, number, name, "sweep=")
                raise UserError(f"sweep '{name}' has no jobs there: choose another, or read its folder")
            paths = [_record(client, run, option_uri(uri), folder / run.info.run_id) for run in reversed(runs)]
            results, broken = read_files(paths, missing_is_broken=True)
            # A record has the name under which it was measured; here the name under which it was stored counts.
            own = tuple(result if result.sweep == name else replace(result, sweep=name) for result in results)
            sweeps.append(Sweep(name, redacted(uri), own, broken))
    return sweeps


def read_run(uri: str, run: str) -> tuple[Path, str, str]:
    """Return the path of the record of a job's run, and the names of its experiment and sweep. Raises UserError."""
    with _opened(uri, "give the job's folder") as client:
        try:
            found = client.get_run(run)
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise UserError(
                f"there is no run {run} at {redacted(uri)}: copy its identifier from the run's page, "
                "with uri=http://HOST:5000 if a server has it"
            ) from error
        kind, sweep = (found.data.tags.get(f"attn_exp.{name}") for name in ("kind", "sweep"))
        if kind != "job" or sweep is None:
            raise UserError(
                f"run {run} is not a job's but of kind {kind}: give a job's run, or the sweep's name {sweep}"
            )
        # All files: the page shows tables of profilers too.
        path = _record(client, found, option_uri(uri), folder_until_exit(), all_files=True)
        return path, client.get_experiment(found.info.experiment_id).name, sweep


def pages(uri: str, experiment: str, sweep: str | None) -> list[str]:
    """Return the address of an experiment's list of sweeps, or those of a sweep's charts and of its own page.

    They are relative to MLflow's first page, which is the address if the experiment does not exist. Raises UserError if
    there is no such store or sweep.
    """
    with _opened(uri, "type another uri=") as client:
        if sweep is None:
            found = find_experiment(client, experiment)
            return ["#/experiments"] if found is None else [store_view(client, found.experiment_id)]
        number = _experiment(client, experiment)
        _check_sweep(client, number, sweep, "attn-exp ui ")
        runs = search(client, number, {"attn_exp.kind": "sweep", "attn_exp.sweep": sweep})
        charts = store_view(client, number, sweep, runs[0].data.params if runs else {})
        return [charts, *(run_page(number, run.info.run_id) for run in runs[:1])]


@contextlib.contextmanager
def _opened(uri: str, otherwise: str) -> "Iterator[MlflowClient]":
    """Yield MLflow's client, and turn the store's errors into a sentence that says what to do."""
    uri = option_uri(uri)
    if (path := database_file(uri)) is not None and not check_database(path):
        raise UserError(f"there is no database {path}: give uri=sqlite:///FOLDER/mlflow.db")
    if importlib.util.find_spec("mlflow") is None:
        raise UserError(f"MLflow is not installed: pip install mlflow, or {otherwise}")
    silence()
    try:
        from mlflow import MlflowClient

        yield MlflowClient(tracking_uri=uri)
    except UserError:
        raise
    except Exception as error:  # libraries below MLflow raise exceptions of their own
        raise UserError(f"MLflow at {redacted(uri)}: {trouble(error, 'uri')}; or {otherwise}") from error


def _record(client: "MlflowClient", run: "Run", uri: str, own: Path, *, all_files: bool = False) -> Path:
    """Return the path of a run's record, which is downloaded into the folder `own` if it is not on this machine.

    The path has no file if the run has no record. If database and artifacts were moved, it is beside the database.
    """
    place, database = local_path(run.info.artifact_uri), database_file(uri)
    if place is not None and database is not None:
        moved = database.parent / "artifacts" / run.info.run_id / "artifacts"
        return (place if place.is_dir() or not moved.is_dir() else moved) / FILE_NAME
    own.mkdir(exist_ok=True)
    with contextlib.suppress(Exception):  # a missing record is reported as such, whatever the store raises
        names = [file.path for file in client.list_artifacts(run.info.run_id)] if all_files else [FILE_NAME]
        for name in names:
            client.download_artifacts(run.info.run_id, name, str(own))
    return own / FILE_NAME


def _experiment(client: "MlflowClient", name: str) -> str:
    found = find_experiment(client, name)
    if found is None:
        raise _unknown(name, [one.name for one in client.search_experiments()], "experiment", "mlflow_experiment=")
    return str(found.experiment_id)


def _check_sweep(client: "MlflowClient", experiment: str, name: str, key: str) -> None:
    if not client.search_runs([experiment], f"tags.`attn_exp.sweep` = {quoted(name)}", max_results=1):
        every = search(client, experiment, {"attn_exp.kind": "sweep"})
        raise _unknown(name, [run.data.tags["attn_exp.sweep"] for run in every], "sweep", key)


def _unknown(name: str, there: Sequence[str], kind: str, key: str) -> UserError:
    known = f"the {kind}s are {', '.join(sorted(set(there))[-8:])}" if there else f"there is no {kind} yet"
    return UserError(f"there is no {kind} '{name}' in that store: {nearest(name, there)}{known}; type {key}NAME")
