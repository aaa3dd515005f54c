"""Read from an MLflow store the records that jobs left there as artifacts.

A sqlite database is read directly and read-only: MLflow's own search takes 16 s for 10,000 runs, and its import 1 to 3
s. Any other store is read through MLflow's client.
"""

import contextlib
import importlib.util
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from attn_exp.core.errors import UserError, nearest
from attn_exp.core.record_file import FILE_NAME
from attn_exp.results.read import Sweep, read_files
from attn_exp.tracking.database import check_database, database_file, opened

if TYPE_CHECKING:
    from mlflow import MlflowClient

_WAIT_S = 10.0
_RUNS = """
SELECT runs.run_uuid, runs.artifact_uri FROM runs
JOIN experiments ON experiments.experiment_id = runs.experiment_id AND experiments.name = ?
JOIN tags AS kind ON kind.run_uuid = runs.run_uuid AND kind.key = 'attn_exp.kind' AND kind.value = 'job'
JOIN tags AS sweep ON sweep.run_uuid = runs.run_uuid AND sweep.key = 'attn_exp.sweep' AND sweep.value = ?
WHERE runs.lifecycle_stage = 'active' ORDER BY runs.start_time
"""
_RUN = """
SELECT runs.artifact_uri, experiments.name, kind.value, sweep.value FROM runs
JOIN experiments ON experiments.experiment_id = runs.experiment_id
LEFT JOIN tags AS kind ON kind.run_uuid = runs.run_uuid AND kind.key = 'attn_exp.kind'
LEFT JOIN tags AS sweep ON sweep.run_uuid = runs.run_uuid AND sweep.key = 'attn_exp.sweep'
WHERE runs.run_uuid = ? AND runs.lifecycle_stage = 'active'
"""
_SWEEPS = """
SELECT DISTINCT tags.value FROM tags JOIN runs ON runs.run_uuid = tags.run_uuid
JOIN experiments ON experiments.experiment_id = runs.experiment_id AND experiments.name = ?
WHERE tags.key = 'attn_exp.sweep' AND runs.lifecycle_stage = 'active'
"""


def read_store(uri: str, experiment: str, names: Sequence[str]) -> list[Sweep]:
    """Return the sweeps of these names in an experiment of an MLflow store.

    Raises:
        UserError: there is no such store, experiment or sweep.
    """
    from attn_exp.tracking.location import option_uri

    uri = option_uri(uri)
    path = database_file(uri)
    if path is None:
        return _by_client(uri, experiment, names)
    if not path.exists():
        raise UserError(f"there is no database {path}: give uri=sqlite:///FOLDER/mlflow.db")
    check_database(path)
    return _from_database(path, uri, experiment, names)


def read_run(uri: str, run: str) -> tuple[Path, str, str]:
    """Return the path of the record of a job's run, and the names of its experiment and sweep.

    Raises:
        UserError: there is no such store or run, or the run is not a job's.
    """
    from attn_exp.tracking.location import option_uri

    uri = option_uri(uri)
    path = database_file(uri)
    if path is None:
        return _run_by_client(uri, run)
    if not path.exists():
        raise UserError(f"there is no database {path}: give uri=sqlite:///FOLDER/mlflow.db")
    check_database(path)
    try:
        with opened(path, _WAIT_S) as database:
            row = database.execute(_RUN, (run,)).fetchone()
    except sqlite3.Error as error:
        raise UserError(f"{path} cannot be read ({error}): give uri=sqlite:///FOLDER/mlflow.db") from error
    if row is None:
        raise UserError(
            f"there is no run {run} in {path}: copy its identifier from the run's page, "
            "with uri=http://HOST:5000 if a server has it"
        )
    place, experiment, kind, sweep = row
    return _artifact(path, run, place), experiment, _of_job(run, kind, sweep)


def _of_job(run: str, kind: str | None, sweep: str | None) -> str:
    """Return the sweep of a job's run. Raises UserError for any other run."""
    if kind != "job" or sweep is None:
        raise UserError(f"run {run} is not a job's but of kind {kind}: give a job's run, or the sweep's name {sweep}")
    return sweep


def check_sweep(path: Path, experiment: str, sweep: str) -> None:
    """Check that an experiment of a sqlite database has this sweep. Raises UserError with the nearest name.

    Its messages name the options of `attn-exp ui`, which calls it.
    """
    try:
        with opened(path, _WAIT_S) as database:
            experiments = [row[0] for row in database.execute("SELECT name FROM experiments")]
            _check(experiment, experiments, "experiment", "mlflow_experiment=")
            there = [row[0] for row in database.execute(_SWEEPS, (experiment,))]
    except sqlite3.Error as error:
        raise UserError(f"{path} cannot be read ({error}): give uri=sqlite:///FOLDER/mlflow.db") from error
    _check(sweep, there, "sweep", "attn-exp ui ")


def _from_database(path: Path, uri: str, experiment: str, names: Sequence[str]) -> list[Sweep]:
    sweeps = []
    try:
        with opened(path, _WAIT_S) as database:
            experiments = [row[0] for row in database.execute("SELECT name FROM experiments")]
            _check(experiment, experiments, "experiment", "mlflow_experiment=")
            for name in names:
                rows = database.execute(_RUNS, (experiment, name)).fetchall()
                if not rows:
                    there = [row[0] for row in database.execute(_SWEEPS, (experiment,))]
                    _check(name, there, "sweep", "sweep=")
                    raise UserError(f"sweep '{name}' has no jobs in {uri}: choose another, or read its folder")
                sweeps.append(_sweep(name, uri, (_artifact(path, run, place) for run, place in rows)))
    except sqlite3.Error as error:
        raise UserError(f"{path} cannot be read ({error}): give uri=sqlite:///FOLDER/mlflow.db") from error
    return sweeps


def _artifact(database: Path, run: str, place: str) -> Path:
    """Return the path of a run's record; next to the database if both were moved."""
    parts = urlsplit(place)
    folder = Path(unquote(parts.path) if parts.scheme == "file" else place)
    moved = database.parent / "artifacts" / run / "artifacts"
    return (folder if folder.is_dir() or not moved.is_dir() else moved) / FILE_NAME


def _by_client(uri: str, experiment: str, names: Sequence[str]) -> list[Sweep]:
    """Read through MLflow's client: one request per page of runs, and one per record."""
    import tempfile

    from attn_exp.core.redaction import redacted
    from attn_exp.tracking.client import search

    sweeps = []
    with _asked(uri, "name sweeps by their folders") as client:
        there = client.get_experiment_by_name(experiment)
        if there is None:
            _check(experiment, [one.name for one in client.search_experiments()], "experiment", "mlflow_experiment=")
            raise UserError(f"there is no experiment '{experiment}': choose another with mlflow_experiment=")
        with tempfile.TemporaryDirectory(prefix="attn_exp_") as folder:
            for name in names:
                runs = search(client, there.experiment_id, {"attn_exp.sweep": name})
                if not runs:
                    every = search(client, there.experiment_id, {"attn_exp.kind": "sweep"})
                    _check(name, [run.data.tags["attn_exp.sweep"] for run in every], "sweep", "sweep=")
                    raise UserError(f"sweep '{name}' has no jobs there: choose another, or read its folder")
                jobs = [run.info.run_id for run in runs if run.data.tags.get("attn_exp.kind") == "job"]
                sweeps.append(
                    _sweep(
                        name,
                        redacted(uri),
                        (_download(client, job, Path(folder, str(index))) for index, job in enumerate(jobs)),
                    )
                )
    return sweeps


def _run_by_client(uri: str, run: str) -> tuple[Path, str, str]:
    """Return what `read_run` returns, with the run's files fetched into a temporary folder."""
    from attn_exp.core.files import folder_until_exit
    from attn_exp.core.redaction import redacted

    with _asked(uri, "give the job's folder") as client:
        try:
            run_info = client.get_run(run)
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise UserError(
                f"there is no run {run} at {redacted(uri)}: copy its identifier from the run's page"
            ) from error
        tags = run_info.data.tags
        sweep = _of_job(run, tags.get("attn_exp.kind"), tags.get("attn_exp.sweep"))
        folder = folder_until_exit()
        # All files: the page shows tables of profilers too.
        for name in client.list_artifacts(run):
            client.download_artifacts(run, name.path, str(folder))
        return folder / FILE_NAME, client.get_experiment(run_info.info.experiment_id).name, sweep


@contextlib.contextmanager
def _asked(uri: str, otherwise: str) -> "Iterator[MlflowClient]":
    """Yield MLflow's client, and turn the store's errors into a sentence that says what to do."""
    from attn_exp.core.redaction import redacted
    from attn_exp.tracking.client import client_of, silence
    from attn_exp.tracking.trouble import trouble

    if importlib.util.find_spec("mlflow") is None:
        raise UserError(f"MLflow is not installed: pip install mlflow, or {otherwise}")
    silence()
    try:
        yield client_of(uri)
    except UserError:
        raise
    except Exception as error:  # libraries below MLflow raise exceptions of their own
        raise UserError(f"MLflow at {redacted(uri)}: {trouble(error, 'uri')}; or {otherwise}") from error


def _download(client: "MlflowClient", run: str, own: Path) -> Path:
    """Download the run's record into a temporary folder; the path has no file if the run has no record."""
    own.mkdir()
    with contextlib.suppress(Exception):  # a missing record is reported as such, whatever the store raises
        client.download_artifacts(run, FILE_NAME, str(own))
    return own / FILE_NAME


def _sweep(name: str, place: str, paths: Iterable[Path]) -> Sweep:
    results, broken = read_files(paths, missing_is_broken=True)
    # A record has the name under which it was measured; here the name under which it was stored counts.
    return Sweep(name, place, tuple(r if r.sweep == name else replace(r, sweep=name) for r in results), broken)


def _check(name: str, there: Sequence[str], kind: str, key: str) -> None:
    if name not in there:
        known = f"the {kind}s are {', '.join(sorted(there)[-8:])}" if there else f"there is no {kind} yet"
        raise UserError(f"there is no {kind} '{name}' in that store: {nearest(name, there)}{known}; type {key}NAME")
