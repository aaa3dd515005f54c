"""Runs: a sweep in MLflow, with one parent run and a child run per job. Calls take as long as the store does.

Storing a sweep again stores nothing twice: a job's run has the time at which its record was finished.
"""

import functools
import gc
import hashlib
import importlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from attn_exp.core.errors import UserError, is_inside
from attn_exp.core.record.file import FILE_NAME, LOG_NAME, sound_record
from attn_exp.core.record.record import Record
from attn_exp.core.record.status import STATUSES
from attn_exp.core.redaction import redacted
from attn_exp.core.versions import __version__
from attn_exp.results.store import sweep_identity
from attn_exp.tracking.base import (
    LIST_PLACE,
    RUN_COLOUR,
    Curve,
    EndStatus,
    Summary,
    SweepInfo,
    ended_at,
    metrics,
    params,
    tags,
)
from attn_exp.tracking.client import (
    AnsweringClient,
    NewRun,
    fitting,
    legal,
    log_values,
    moved_artifacts,
    open_experiment,
    search,
    silence,
    source,
    store_files,
    store_run,
)
from attn_exp.tracking.database import database_file, prepare_database
from attn_exp.tracking.location import MlflowPlace, is_server
from attn_exp.tracking.page import is_edited, job_note, metrics_at, note_tags, run_page, store_standing, store_summary
from attn_exp.tracking.view import store_view

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

# A record has its request.
_FILES = (FILE_NAME, LOG_NAME)
JOB, FINISHED_AT, SWEEP_ID = "attn_exp.job", "attn_exp.finished_at", "attn_exp.sweep_id"
_PARENT = "mlflow.parentRunId"
# The colour of a sweep's own run: MLflow would give it that of a backend by chance.
_NEUTRAL = "#808080"


def keep_curves(client: "MlflowClient", experiment: str, parent: "Run", curves: Sequence[Curve]) -> None:
    """Store the curves of a sweep, as runs and on its own; those that are there stay, outdated runs are deleted."""
    wanted = {_digest(curve): curve for curve in curves}
    of_parent = {_PARENT: parent.info.run_id, "attn_exp.kind": "curve"}
    for run in search(client, experiment, of_parent):
        # An incomplete run contains nothing of value.
        digest = run.data.tags.get("attn_exp.curve", "") if run.info.status == "FINISHED" else ""
        if wanted.pop(digest, None) is None:
            client.delete_run(run.info.run_id)
    for digest, curve in wanted.items():
        tags = {"kind": "curve", "sweep": parent.data.tags["attn_exp.sweep"], "label": curve.label, "curve": digest}
        new = NewRun(
            name=curve.name,
            parent=parent.info.run_id,
            moments=(curve.moment, curve.moment),
            tags={f"attn_exp.{key}": value for key, value in tags.items()} | {RUN_COLOUR: curve.colour},
            params=curve.params,
            # Between the sweep's own run and its jobs, of which MLflow then shows the first ten.
            metrics=_metrics(curve, curve.points | {LIST_PLACE: ((0, 0.5),)}),
        )
        store_run(client, experiment, new)
        rates = {
            name.replace("_by_length", f"/{curve.name.replace(' · ', ' ')}"): points
            for name, points in curve.points.items()
            if name.endswith("/tflops_by_length")
        }
        log_values(client, parent.info.run_id, _metrics(curve, rates))


def _metrics(curve: Curve, points: Mapping[str, tuple[tuple[int, float], ...]]) -> "list[Metric]":
    from mlflow.entities import Metric

    return [
        Metric(name, value, int(curve.moment * 1000), step)
        for name, values in legal(points).items()
        for step, value in values
        if math.isfinite(value)
    ]


def _digest(curve: Curve) -> str:
    """Return a digest of a curve, so that storing the same sweep again adds none."""
    what = [curve.name, sorted(curve.params.items()), sorted(curve.points.items())]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


class Runs:
    """The runs of one sweep in a store, which is not contacted yet, for use by one thread.

    Raises UserError if MLflow is not installed.
    """

    def __init__(self, place: MlflowPlace, sweep: SweepInfo) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise UserError("MLflow is not installed: pip install mlflow, or use tracker=none")
        silence()
        self.sweep, self._place = sweep, place
        # Called whenever the store has answered a request.
        self.answered: Callable[[], None] = lambda: None
        # That the store's files are not where it looks for them, as a sentence.
        self.moved: str | None = None
        self._client: MlflowClient | None = None
        self._experiment = self._parent = self._view = self._sweep_id = ""
        # job: its runs, each with `finished_at` of its record, None for an incomplete run
        self._runs: dict[str, list[tuple[str, str | None]]] = {}
        # Runs whose description somebody edited.
        self._edited: set[str] = set()

    @property
    def pages(self) -> tuple[str, str]:
        """The addresses of the sweep's page and of its charts, below the server's."""
        return run_page(self._experiment, self._parent), self._view

    def prepare(self) -> None:
        """Import MLflow, and create a database file, which is this process's own work. Raises UserError if broken."""
        _import_mlflow()
        if (path := database_file(self._place.uri)) is not None:
            prepare_database(path)

    def connect(self) -> "MlflowClient":
        """Return the client, once the experiment and the sweep's run exist; retried after a failure."""
        if self._client is None:
            self.prepare()
            from mlflow import MlflowClient

            place = self._place
            client = cast(MlflowClient, AnsweringClient(MlflowClient(tracking_uri=place.uri), self.answered))
            experiment = open_experiment(client, place.experiment, place.artifacts)
            if not is_server(place.uri):
                # Before anything is written there, which makes the folder again.
                self.moved = self.moved or moved_artifacts(experiment)
            if place.elsewhere and place.artifacts != experiment.artifact_location and not self.moved:
                raise UserError(
                    f"MLflow's experiment {experiment.name} has its files in {experiment.artifact_location}: leave "
                    f"tracker.artifacts={place.artifacts} out, or choose another experiment: mlflow_experiment=NAME"
                )
            self._experiment = str(experiment.experiment_id)
            self._parent = self._open_parent(client)
            self._client = client
        return self._client

    def add(self, record: Record, folder: Path) -> bool:
        """Store one job as a finished run, and return whether it was new; it replaces a run of an earlier attempt."""
        client, ended = self.connect(), ended_at(record)
        stored_runs = self._runs.setdefault(record.request.job, [])
        # Kept sweeps have the number.
        kept = next((run for run, stored in stored_runs if stored in (ended, repr(record.finished_at))), None)
        new = kept is None
        if kept is None:
            kept = store_run(client, self._experiment, self._new_run(record, folder))
            stored_runs.append((kept, ended))
        for old in [entry for entry in stored_runs if entry[0] != kept]:
            client.delete_run(old[0])
            stored_runs.remove(old)
        return new

    def _new_run(self, record: Record, folder: Path) -> NewRun:
        """Return a record and the files in its job's folder as a finished run."""
        note = job_note(record, record.request.measuring, {}, run_page(self._experiment, self._parent))
        profiled = (name for profile in record.profiles.values() for name in profile.files)
        return NewRun(
            # What sweeps vary most first: MLflow cuts names in legends and columns after some twenty letters.
            name=f"{record.label} {record.request.case.brief()} ({record.request.sweep})",
            parent=self._parent,
            moments=(record.started_at, record.finished_at),
            tags=tags(record) | note_tags(note) | {SWEEP_ID: self._sweep_id},
            params=params(record.request),
            metrics=metrics_at(metrics(record), record.finished_at),
            status="FINISHED" if STATUSES[record.status].finished else "FAILED",
            files=_stored_files((folder / name for name in (*_FILES, *profiled)), folder),
        )

    def end(self, status: EndStatus, summary: Summary, ended: float | None = None) -> None:
        """End the sweep's run with its summary; `ended` is its end in seconds since 1970, None means now."""
        client = self.connect()
        moment_ms = None if ended is None else int(ended * 1000)
        if status == "KILLED":
            # An interrupt leaves a second for all of this.
            client.set_terminated(self._parent, status, moment_ms)
        try:
            self._store(client, summary)
        finally:
            client.set_terminated(self._parent, status, moment_ms)

    def _store(self, client: "MlflowClient", summary: Summary) -> None:
        parent = client.get_run(self._parent)
        files = _stored_files(summary.files, self.sweep.folder)
        # First, because it takes one call: the answer is there even if the files are refused.
        names = [f"{place}/{file.name}" if place else file.name for file, place in files.items()]
        store_summary(client, parent, summary, names)
        store_view(client, self._experiment)
        self._view = store_view(client, self._experiment, self.sweep.name, summary.params)
        store_files(client, self._parent, files)
        page = run_page(self._experiment, self._parent)
        latest = {job: runs[-1][0] for job, runs in self._runs.items() if runs}
        for result in summary.results:
            if (run := latest.get(result.job)) is not None:
                store_standing(client, run, result, summary, page, with_note=run not in self._edited)
        for job, job_files in summary.job_files.items():
            if job in latest:
                files = _stored_files(job_files, self.sweep.folder / job)
                store_files(client, latest[job], files)
        if summary.curves:
            keep_curves(client, self._experiment, parent, summary.curves)

    def _open_parent(self, client: "MlflowClient") -> str:
        """Return the sweep's run, a new one if there is none, and find the runs of its jobs."""
        # On a shared server, sweeps of two users may have the same name.
        self._sweep_id = sweep_identity(self.sweep.folder)
        identity = {"attn_exp.sweep": self.sweep.name, "attn_exp.kind": "sweep", SWEEP_ID: self._sweep_id}
        own_tags = {
            "attn_exp.folder": str(self.sweep.folder.absolute()),
            "attn_exp.command": redacted(self.sweep.command),
            "attn_exp.version": __version__,
            RUN_COLOUR: _NEUTRAL,
        }
        parents = search(client, self._experiment, identity) or self._parents_of_a_job(client)
        if parents:
            parent = str(parents[-1].info.run_id)
            client.update_run(parent, "RUNNING")
            log_values(client, parent, [], own_tags)
        else:
            tags = fitting(identity | own_tags) | source()
            if surrounding := os.environ.get("MLFLOW_RUN_ID"):
                tags[_PARENT] = surrounding
            began_ms = int(self.sweep.began * 1000) if self.sweep.began is not None else None
            parent = str(client.create_run(self._experiment, began_ms, tags, self.sweep.name).info.run_id)
        self._runs.clear()
        # By the parent too: runs of earlier versions do not have the sweep's tag.
        of_sweep: dict[str, Run] = {}
        for found_by in ({SWEEP_ID: self._sweep_id}, {_PARENT: parent}):
            for run in search(client, self._experiment, found_by | {"attn_exp.kind": "job"}):
                of_sweep[run.info.run_id] = run
        for run in of_sweep.values():
            if run.data.tags.get(_PARENT) != parent:
                # Somebody deleted the sweep's run, and not those of its jobs.
                client.set_tag(run.info.run_id, _PARENT, parent)
            if is_edited(run.data.tags):
                self._edited.add(run.info.run_id)
            # A run that was not stored wholly is replaced.
            finished = run.data.tags.get(FINISHED_AT) if run.info.status != "RUNNING" else None
            self._runs.setdefault(run.data.tags.get(JOB, ""), []).append((run.info.run_id, finished))
        return parent

    def _parents_of_a_job(self, client: "MlflowClient") -> "list[Run]":
        """Return the run of this name that has one of the sweep's jobs, where the folder lost its identity."""
        named = {"attn_exp.sweep": self.sweep.name, "attn_exp.kind": "sweep"}
        for parent in search(client, self._experiment, named):
            of_parent = {_PARENT: parent.info.run_id, "attn_exp.kind": "job"}
            runs = search(client, self._experiment, of_parent)
            stored = {(run.data.tags.get(JOB), run.data.tags.get(FINISHED_AT)) for run in runs}
            for path in sorted(self.sweep.folder.glob(f"*/{FILE_NAME}")):
                record = sound_record(path.parent)
                # Not all of them may be stored yet.
                if record is not None and stored & {
                    (record.request.job, ended) for ended in (ended_at(record), repr(record.finished_at))
                }:
                    self._sweep_id = parent.data.tags.get(SWEEP_ID, self._sweep_id)
                    return [parent]
        return []


@functools.cache
def _import_mlflow() -> None:
    importlib.import_module("mlflow")
    # Its modules are most of this process's objects, and stay: looking through them for garbage takes 0.1 s each time.
    gc.freeze()


def _stored_files(files: Iterable[Path], folder: Path) -> dict[Path, str | None]:
    """Return those of a folder's files that are not empty, each with its artifact path: its path in the folder.

    Names in a record and links in a folder may be somebody else's: they select no other files for upload.
    """
    stored: dict[Path, str | None] = {}
    for file in files:
        if file.is_file() and file.stat().st_size > 0 and is_inside(file, folder):
            parent = file.parent
            inside = parent != folder and parent.is_relative_to(folder)
            stored[file] = parent.relative_to(folder).as_posix() if inside else None
    return stored
