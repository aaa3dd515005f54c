"""Runs: a sweep in MLflow, with one parent run and a child run per job. Calls take as long as the store does.

Storing a sweep again, or from several processes, stores nothing twice: a job's run has the time at which its record was
finished, and items are locked against other processes while they are stored.
"""

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from attn_exp.core.errors import is_inside
from attn_exp.core.files import temporary_folder
from attn_exp.core.record import Record
from attn_exp.core.record_file import FILE_NAME, LOG_NAME, sound_record
from attn_exp.core.redaction import redacted
from attn_exp.core.request import REQUEST_NAME
from attn_exp.core.status import STATUSES
from attn_exp.core.version import __version__
from attn_exp.results.store import place_identity, sweep_identity
from attn_exp.tracking.base import (
    RUN_COLOUR,
    Curve,
    EndStatus,
    Summary,
    SweepInfo,
    metrics,
    params,
    run_name,
    samples_csv,
    tags,
)
from attn_exp.tracking.client import (
    METRICS_BATCH,
    PARAM_LENGTH,
    PARAMS_BATCH,
    client_of,
    fitting,
    legal,
    moved_artifacts,
    open_experiment,
    search,
    source,
    whole_run,
)
from attn_exp.tracking.database import database_file, opened, prepare_database
from attn_exp.tracking.job_page import ended_at, job_note
from attn_exp.tracking.location import is_server
from attn_exp.tracking.lock import Writers
from attn_exp.tracking.page import NOTE, run_page, store_standing, store_summary
from attn_exp.tracking.trouble import ArtifactError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_FILES = (FILE_NAME, REQUEST_NAME, LOG_NAME)
KIND, JOB, FINISHED_AT = (f"attn_exp.{name}" for name in ("kind", "job", "finished_at"))
_CHILDREN = f"""
SELECT runs.run_uuid, runs.status, tags.key, tags.value FROM tags AS parent
JOIN runs ON runs.run_uuid = parent.run_uuid AND runs.lifecycle_stage = 'active'
LEFT JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key IN ('{KIND}', '{JOB}', '{FINISHED_AT}')
WHERE parent.key = 'mlflow.parentRunId' AND parent.value = ?
"""
_WAIT_S = 20.0
# The colour of a sweep's own run: MLflow would give it that of a backend by chance.
_NEUTRAL = "#808080"
# The experiment of duels: their numbers would spoil the charts of sweeps.
_DUELS = "_duels"


def create_job_run(client: "MlflowClient", experiment: str, parent: str, record: Record, folder: Path) -> str:
    """Store a record and the files in its job's folder as a finished run, and return its id."""

    def fill(run: "Run") -> None:
        _log_batches(client, run.info.run_id, record)
        _log_files(client, run, record, folder)

    status = "FINISHED" if STATUSES[record.status].finished else "FAILED"
    own = tags(record) | {"mlflow.parentRunId": parent}
    own[NOTE] = job_note(record, record.request.measuring, {}, run_page(experiment, parent))
    return whole_run(client, experiment, run_name(record), own, (record.started_at, record.finished_at), status, fill)


def _log_batches(client: "MlflowClient", run: str, record: Record) -> None:
    from mlflow.entities import Metric, Param

    moment_ms = int(record.finished_at * 1000)
    of_metrics = [Metric(legal(key), value, moment_ms, 0) for key, value in metrics(record).items()]
    of_params = [Param(legal(key), value[:PARAM_LENGTH]) for key, value in params(record.request).items()]
    while of_metrics or of_params:
        client.log_batch(run, of_metrics[:METRICS_BATCH], of_params[:PARAMS_BATCH])
        of_metrics, of_params = of_metrics[METRICS_BATCH:], of_params[PARAMS_BATCH:]


def _log_files(client: "MlflowClient", run: "Run", record: Record, folder: Path) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with temporary_folder() as temporary:
        profiled = [name for profile in record.profiles.values() for name in profile.files]
        for name in (*_FILES, *profiled):
            path, place = folder / name, Path(temporary, name)
            # Names in a record and links in a folder may be somebody else's: they must not select other files for
            # upload.
            if ".." in path.parts or not path.is_file() or not is_inside(path, folder):
                continue
            if place.is_relative_to(temporary) and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(path.absolute())
        Path(temporary, "samples.csv").write_text(samples_csv(record), encoding="utf-8")
        try:
            # Not through the client's method, which requests the new run again: a tenth of a job's cost.
            get_artifact_repository(run.info.artifact_uri, client.tracking_uri).log_artifacts(temporary)
        except Exception as error:
            raise ArtifactError(str(error)) from error


def _store_file(client: "MlflowClient", run: str, file: Path, place: str | None) -> None:
    try:
        client.log_artifact(run, str(file), place)
    except Exception as error:
        raise ArtifactError(str(error)) from error


def keep_curves(
    client: "MlflowClient",
    experiment: str,
    parent: "Run",
    curves: Sequence[Curve],
    answered: Callable[[], None] = lambda: None,
) -> None:
    """Store the curves of a sweep; those that are there stay, outdated ones are deleted.

    `answered` is called after each of them.
    """
    wanted = {_digest(curve): curve for curve in curves}
    of_parent = {"mlflow.parentRunId": parent.info.run_id, "attn_exp.kind": "curve"}
    for run in search(client, experiment, of_parent):
        # An incomplete run contains nothing of value.
        digest = run.data.tags.get("attn_exp.curve", "") if run.info.status == "FINISHED" else ""
        if wanted.pop(digest, None) is None:
            client.delete_run(run.info.run_id)
    for digest, curve in wanted.items():
        _create(client, experiment, parent, curve, digest)
        answered()


def _create(client: "MlflowClient", experiment: str, parent: "Run", curve: Curve, digest: str) -> None:
    from mlflow.entities import Metric, Param

    own = {"kind": "curve", "sweep": parent.data.tags["attn_exp.sweep"], "label": curve.label, "curve": digest}
    tags = {f"attn_exp.{key}": value for key, value in own.items()} | {"mlflow.parentRunId": parent.info.run_id}
    tags |= {RUN_COLOUR: curve.colour}
    points = [
        Metric(legal(name), value, int(curve.moment * 1000), step)
        for name, values in curve.points.items()
        for step, value in values
        if math.isfinite(value)
    ]
    params = [Param(legal(key), value[:PARAM_LENGTH]) for key, value in curve.params.items()]

    def fill(run: "Run") -> None:
        for begin in range(0, len(points), METRICS_BATCH):
            client.log_batch(run.info.run_id, points[begin : begin + METRICS_BATCH], params if begin == 0 else ())

    whole_run(client, experiment, curve.name, tags, (curve.moment, curve.moment), "FINISHED", fill)


def _digest(curve: Curve) -> str:
    """Return a digest of a curve, so that storing the same sweep again adds none."""
    what = [curve.name, sorted(curve.params.items()), sorted(curve.points.items())]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StoredRun:
    """A run below a sweep's run: its status (`FINISHED`, `RUNNING`, ...), and its identifying tags."""

    run: str
    status: str
    tags: dict[str, str]


def jobs_in_database(path: Path, parent: str) -> list[StoredRun]:
    """Return the active runs below `parent` in MLflow's sqlite database. Raises sqlite3.Error."""
    runs: dict[str, StoredRun] = {}
    with opened(path, _WAIT_S) as database:
        for run, status, key, value in database.execute(_CHILDREN, (parent,)):
            tags = runs.setdefault(run, StoredRun(run, status, {})).tags
            if key is not None:
                tags[key] = value
    return [run for run in runs.values() if run.tags.get(KIND) == "job"]


class Runs:
    """The runs of one sweep in the store at `uri`, for use by one thread."""

    def __init__(
        self, uri: str, artifacts: str | None, experiment: str, sweep: SweepInfo, upgrade: str = "copy"
    ) -> None:
        self.sweep = sweep
        # Whether the sweep had no run in the store before.
        self.fresh = False
        # What happened to the database, as a sentence.
        self.note: str | None = None
        # Called whenever the store has answered a part of what takes as many requests as there are jobs.
        self.answered: Callable[[], None] = lambda: None
        # That the store's files are not where it looks for them, as a sentence.
        self.moved: str | None = None
        self._uri, self._artifacts, self._experiment_name = uri, artifacts, experiment
        self._upgrade = upgrade
        self._writers = Writers(sweep.folder)
        self._client: MlflowClient | None = None
        self._experiment = self._parent = ""
        # job: its runs, each with `finished_at` of its record, None for an incomplete run
        self._runs: dict[str, list[tuple[str, str | None]]] = {}

    @property
    def page(self) -> str:
        """The address of the sweep's page, below the server's."""
        return f"/{run_page(self._experiment, self._parent)}"

    def prepare(self) -> None:
        """Import MLflow, which is this process's own work."""
        _import_mlflow()

    def connect(self) -> "MlflowClient":
        """Return the client, once the experiment and the sweep's run exist; retried after a failure.

        A database file is created or upgraded before. Raises UserError if it is broken.
        """
        if self._client is None:
            self.prepare()
            self.note = prepare_database(self._uri, self._upgrade) or self.note
            client = client_of(self._uri)
            duel = self.sweep.kind == "duel"
            own = f"{self._experiment_name}{_DUELS}" if duel else self._experiment_name
            self._experiment = open_experiment(client, own, self._artifacts)
            if not is_server(self._uri):
                # Before anything is written there, which makes the folder again.
                self.moved = self.moved or moved_artifacts(client, self._experiment)
            # Duels were stored beside sweeps once; those that are there stay there.
            earlier = client.get_experiment_by_name(self._experiment_name) if duel else None
            with self._writers.exclusive("parent"):
                self._writers.mark_known()
                self._parent = self._open_parent(
                    client, [self._experiment, *([earlier.experiment_id] if earlier else [])]
                )
            self._client = client
        return self._client

    def add(self, record: Record, folder: Path) -> bool:
        """Store one job as a finished run, unless it is there; a run of an earlier attempt is replaced.

        If the job's folder has a record, that one counts: another process may have measured the job meanwhile.

        Returns:
            Whether it was new.
        """
        client, job = self.connect(), record.request.job
        with self._writers.exclusive(job) as others:
            if others:
                self._runs.pop(job, None)
                self._remember(self._search_jobs(client, {JOB: job}))
            there = self._runs.setdefault(job, [])
            kept = _run_of(record, there)
            if kept is None and there:
                record = sound_record(folder) or record
                kept = _run_of(record, there)
            new = kept is None
            if kept is None:
                kept = create_job_run(client, self._experiment, self._parent, record, folder)
                there.append((kept, ended_at(record)))
            for old in [entry for entry in there if entry[0] != kept]:
                client.delete_run(old[0])
                there.remove(old)
        return new

    def end(
        self,
        status: EndStatus,
        artifacts: Sequence[Path],
        summary: Summary,
        curves: Sequence[Curve],
        of_jobs: Mapping[str, Sequence[Path]] = MappingProxyType({}),
        ended: float | None = None,
    ) -> None:
        """End the sweep's run with its files, summary and curves, and refresh the database's statistics.

        `of_jobs` are files of single jobs by folder name; `ended` is the end in seconds since 1970; None means now.
        """
        client = self.connect()
        moment_ms = None if ended is None else int(ended * 1000)
        if status == "KILLED":
            # An interrupt leaves a second for all of this.
            client.set_terminated(self._parent, status, moment_ms)
        try:
            parent = client.get_run(self._parent)
            files = [file for file in artifacts if file.is_file() and is_inside(file, self.sweep.folder)]
            places = {file: _place(file, self.sweep.folder) for file in files}
            # First, because it takes one call: the answer is there even if the files are refused.
            names = [f"{place}/{file.name}" if place else file.name for file, place in places.items()]
            store_summary(client, parent, summary, names)
            for file, place in places.items():
                _store_file(client, self._parent, file, place)
                self.answered()
            for result in summary.results:
                for run, _ in self._runs.get(result.job, ())[-1:]:
                    store_standing(client, run, result, summary, run_page(self._experiment, self._parent))
                    self.answered()
            for job, own_files in of_jobs.items():
                own = self.sweep.folder / job
                for run, _ in self._runs.get(job, ())[-1:]:
                    for file in own_files:
                        if file.is_file() and is_inside(file, own):
                            _store_file(client, run, file, _place(file, own))
                            self.answered()
            if curves:
                with self._writers.exclusive("curves"):
                    keep_curves(client, self._experiment, parent, curves, self.answered)
        finally:
            client.set_terminated(self._parent, status, moment_ms)
        if (path := database_file(self._uri)) is not None:
            # Without statistics, sorting by a metric takes 4 s at 10,000 runs instead of 0.2 s. If another process
            # keeps the database locked, they are skipped.
            busy = contextlib.suppress(sqlite3.OperationalError)
            with busy, contextlib.closing(sqlite3.connect(path, timeout=2)) as database:
                database.execute("PRAGMA analysis_limit=400")
                database.execute("ANALYZE")

    def _open_parent(self, client: "MlflowClient", experiments: Sequence[str]) -> str:
        """Return the sweep's run and the runs of its jobs if one of the experiments has them, else a new run."""
        identity = {"attn_exp.sweep": self.sweep.name, "attn_exp.kind": self.sweep.kind}
        # On a shared server, sweeps of two users may have the same name.
        own = {
            "attn_exp.sweep_id": sweep_identity(self.sweep.folder),
            "attn_exp.folder": str(self.sweep.folder.absolute()),
        }
        own_tags = {"attn_exp.command": redacted(self.sweep.command), "attn_exp.version": __version__}
        own_tags[RUN_COLOUR] = _NEUTRAL
        named = [run for experiment in experiments for run in search(client, experiment, identity)]
        parents = [run for run in named if _is_same(run, own, self.sweep.folder)]
        if not parents:
            self.fresh = True
            tags = fitting(identity | own | own_tags) | source()
            began_ms = int(self.sweep.began * 1000) if self.sweep.began is not None else None
            return str(client.create_run(self._experiment, began_ms, tags, self.sweep.name).info.run_id)
        self._parent = str(parents[-1].info.run_id)
        client.update_run(self._parent, "RUNNING")
        for key, value in fitting(own | own_tags).items():
            client.set_tag(self._parent, key, value)
        self._runs.clear()
        path = database_file(self._uri)
        self._remember(jobs_in_database(path, self._parent) if path is not None else self._search_jobs(client, {}))
        return self._parent

    def _search_jobs(self, client: "MlflowClient", wanted: dict[str, str]) -> list[StoredRun]:
        of_parent = {"mlflow.parentRunId": self._parent, "attn_exp.kind": "job"}
        stored = search(client, self._experiment, of_parent | wanted, self.answered)
        return [StoredRun(run.info.run_id, run.info.status, run.data.tags) for run in stored]

    def _remember(self, runs: Sequence[StoredRun]) -> None:
        for run in runs:
            finished = run.tags.get(FINISHED_AT) if run.status != "RUNNING" else None
            self._runs.setdefault(run.tags.get(JOB, ""), []).append((run.run, finished))


@functools.cache
def _import_mlflow() -> None:
    importlib.import_module("mlflow")
    # Its modules are most of this process's objects, and stay: looking through them for garbage takes 0.1 s each time.
    gc.freeze()


def _run_of(record: Record, there: Sequence[tuple[str, str | None]]) -> str | None:
    # Runs of earlier versions have the number.
    known = (ended_at(record), repr(record.finished_at))
    return next((run for run, stored in there if stored in known), None)


def _is_same(run: "Run", own: Mapping[str, str], folder: Path) -> bool:
    """Return whether a run with the sweep's name is the sweep's, also if its folder got an identity later."""
    known = run.data.tags.get("attn_exp.sweep_id")
    if known is None:
        return run.data.tags.get("attn_exp.folder") == own["attn_exp.folder"]
    return known in (own["attn_exp.sweep_id"], place_identity(folder))


def _place(file: Path, folder: Path) -> str | None:
    """Return the artifact path of one of the sweep's files: its path in the sweep's folder."""
    own = file.parent
    return own.relative_to(folder).as_posix() if own != folder and own.is_relative_to(folder) else None
