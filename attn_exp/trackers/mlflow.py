"""Records as MLflow runs: one parent run a sweep, one child run a job, all from one background thread.

Each job becomes a run when it is done, in one go: a process that is killed between jobs leaves no job RUNNING.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import attn_exp
from attn_exp.errors import UserError
from attn_exp.litter import owner_mark
from attn_exp.record import Record
from attn_exp.trackers.base import (
    Background,
    Curve,
    EndStatus,
    SweepInfo,
    metrics,
    params,
    redacted,
    run_name,
    samples_csv,
    tags,
    user_name,
)
from attn_exp.trackers.stored import CURVE, FINISHED_AT, JOB, KIND, StoredRun, stored_in_database

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DEFAULT_URI = "sqlite:///mlruns/mlflow.db"
# Read by MLflow when it is imported: nothing printed, nothing sent, and a lost server noticed within seconds.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_SERVERS = ("http", "https")
_DATABASES = ("postgresql", "mysql", "mssql")
_JOB_FILES = ("record.json", "request.yaml", "worker.log")
_FINE = ("ok", "unsupported", "unavailable")
# Beyond these MLflow refuses a batch or cuts a value.
_PARAMS_BATCH, _METRICS_BATCH, _PARAM_LENGTH, _TAG_LENGTH = 100, 900, 6000, 8000
_LOCK_WAIT_S = 300.0
# Share of a closing's time limit that records get; the rest ends the sweep's run.
_FLUSH_SHARE = 0.6


def absolute_uri(uri: str) -> str:
    """The URI with a sqlite path made absolute: a relative one is another database in every folder.

    Raises:
        UserError: a URI that MLflow has no store for.
    """
    kind, _, rest = uri.partition("://")
    scheme = kind.split("+")[0] if rest else urlsplit(uri).scheme
    if scheme == "sqlite":
        name, question, query = rest.removeprefix("/").partition("?")
        if not rest.startswith("/") or name in ("", ":memory:"):
            raise UserError(f"tracker.uri={uri} names no database file: use tracker.uri={DEFAULT_URI}")
        return f"{kind}:///{Path(name).absolute()}{question}{query}"
    if rest and scheme in (*_SERVERS, *_DATABASES):
        return uri
    if scheme in ("", "file"):
        raise UserError(f"MLflow no longer stores into plain folders ({uri}): use tracker.uri={DEFAULT_URI}")
    known = ", ".join(("sqlite", *_SERVERS, *_DATABASES))
    raise UserError(f"tracker.uri={redacted(uri)} is none of {known}: use tracker.uri={DEFAULT_URI}")


def database_file(uri: str) -> Path | None:
    """The file of a sqlite URI that `absolute_uri` gave, None for any other store."""
    return Path(uri.partition(":///")[2].partition("?")[0]) if uri.startswith("sqlite") else None


def check_database(path: Path) -> None:
    """See that the installed MLflow can use a database file, without importing MLflow.

    Raises:
        UserError: the file is no sqlite database, or a newer MLflow wrote it.
    """
    if not path.exists():
        return
    elsewhere = "choose another database with tracker.uri=sqlite:///..."
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=0)) as database:
            revisions = [row[0] for row in database.execute("SELECT version_num FROM alembic_version")]
    except sqlite3.OperationalError:
        return  # empty, or just being written by another process: MLflow waits for that
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} is not a sqlite database ({error}): {elsewhere}") from error
    spec = importlib.util.find_spec("mlflow")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    migrations = [file.name for folder in folders for file in (folder / "store/db_migrations/versions").glob("*.py")]
    known = {name.split("_")[0] for name in migrations}
    if known and not known.issuperset(revisions):
        raise UserError(
            f"the database {path} was written by a newer MLflow than the installed {version('mlflow')}: "
            f"upgrade mlflow, or {elsewhere}"
        )


class MlflowTracker:
    """Stores the records of a sweep in MLflow. `config` has `uri`, `artifacts` and `experiment`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._uri = absolute_uri(str(config.get("uri") or DEFAULT_URI))
        self._experiment = str(config.get("experiment") or "attn_exp")
        self._artifacts: str | None = str(config.get("artifacts") or "mlruns/artifacts")
        if "://" not in self._artifacts:
            # A server places artifacts itself: a path of this machine would mean nothing there.
            local = not self._uri.startswith(_SERVERS)
            self._artifacts = str(Path(self._artifacts).absolute()) if local else None
        self._store: _Store | None = None
        self._thread: Background | None = None

    def open(self, sweep: SweepInfo) -> None:
        """Check the location, then import MLflow and open the store in the background."""
        if importlib.util.find_spec("mlflow") is None:
            raise UserError("MLflow is not installed: pip install mlflow, or use tracker=none")
        path = database_file(self._uri)
        if path is not None:
            _make_writable(path.parent, "tracker.uri=sqlite:///FOLDER/mlflow.db")
            if path.exists() and not os.access(path, os.W_OK):
                raise UserError(f"{path} cannot be written: choose another database with tracker.uri=sqlite:///...")
            check_database(path)
        if self._artifacts is not None and "://" not in self._artifacts:
            _make_writable(Path(self._artifacts), "tracker.artifacts=FOLDER")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # It prints each retry; what could not be stored is told when the sweep is closed.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._store = _Store(self._uri, self._artifacts, self._experiment, sweep)
        self._thread = Background("mlflow")
        self._thread.put_always(self._store.connect)

    def log(self, record: Record, folder: Path) -> None:
        """Queue one job that is done."""
        if self._store is not None and self._thread is not None:
            store = self._store
            self._thread.put(lambda: store.add(record, folder))

    def settle(self) -> None:
        """Wait until everything queued is stored."""
        if self._thread is not None:
            self._thread.settle()

    def close(
        self,
        status: EndStatus,
        artifacts: Sequence[Path],
        *,
        metrics: Mapping[str, float] | None = None,
        curves: Sequence[Curve] = (),
        timeout_s: float | None = None,
    ) -> str | None:
        """Store what is left, end the sweep's run; one sentence if something is missing in MLflow."""
        store, thread = self._store, self._thread
        if store is None or thread is None:
            return None
        ended = threading.Event()
        if not thread.settle(None if timeout_s is None else timeout_s * _FLUSH_SHARE):
            thread.give_up()
        thread.put_always(lambda: store.end(status, artifacts, metrics or {}, curves, ended))
        thread.settle(None if timeout_s is None else timeout_s * (1 - _FLUSH_SHARE))
        thread.stop()
        # Not earlier: whoever is interrupted while waiting above may close again, with less time.
        self._store = self._thread = None
        if ended.is_set() and not thread.unstored:
            return None
        count = thread.unstored
        what = f"{count} record{'s' if count > 1 else ''}" if count else "the end of the sweep's run"
        said = str(thread.errors[0]).strip().partition("\n")[0] if thread.errors else "there was no time left"
        return (
            f"MLflow at {redacted(self._uri)} lacks {what} ({redacted(said)[:300]}): every record is safe in "
            f"{store.sweep.folder}, and the same command with sweep={store.sweep.name} stores it later"
        )


class _Store:
    """MLflow's side, used by the background thread alone."""

    def __init__(self, uri: str, artifacts: str | None, experiment: str, sweep: SweepInfo) -> None:
        self.sweep = sweep
        self._uri, self._artifacts, self._experiment_name = uri, artifacts, experiment
        self._client: MlflowClient | None = None
        self._experiment = self._parent = ""
        # job: its runs, each with the `finished_at` of the record it holds; None for one that was cut short
        self._runs: dict[str, list[tuple[str, str | None]]] = {}
        # What each curve's run holds, and the run; what was cut short holds nothing that could be wanted.
        self._curves: list[tuple[str, str]] = []

    def connect(self) -> "MlflowClient":
        """The client, with the experiment and the sweep's run there; tried again after a failure."""
        if self._client is None:
            from filelock import FileLock
            from mlflow import MlflowClient

            # Several processes that open a fresh database at once would break it, and make several parents.
            with contextlib.ExitStack() as held:
                if (path := database_file(self._uri)) is not None:
                    held.enter_context(FileLock(f"{path}.lock", timeout=_LOCK_WAIT_S))
                client = MlflowClient(tracking_uri=self._uri)
                self._experiment = self._open_experiment(client)
                self._parent = self._open_parent(client)
            self._client = client
        return self._client

    def add(self, record: Record, folder: Path) -> None:
        """Store one job as a run that is ended, unless it is there; a run of an earlier try is replaced."""
        client, job, finished = self.connect(), record.request.job, repr(record.finished_at)
        there = self._runs.setdefault(job, [])
        kept = next((run for run, stored in there if stored == finished), None)
        if kept is None:
            kept = self._create(client, record, folder)
            there.append((kept, finished))
        for old in [entry for entry in there if entry[0] != kept]:
            client.delete_run(old[0])
            there.remove(old)

    def _create(self, client: "MlflowClient", record: Record, folder: Path) -> str:
        found = _cut(tags(record) | {"mlflow.parentRunId": self._parent} | _source())
        started_ms = int(record.started_at * 1000) or None
        run = str(client.create_run(self._experiment, started_ms, found, run_name(record)).info.run_id)
        try:
            _log_batches(client, run, record)
            with tempfile.TemporaryDirectory(prefix=f"attn_exp_{owner_mark()}") as temporary:
                for path in (folder / name for name in _JOB_FILES):
                    if path.is_file():
                        Path(temporary, path.name).symlink_to(path.absolute())
                Path(temporary, "samples.csv").write_text(samples_csv(record))
                client.log_artifacts(run, temporary)
            status = "FINISHED" if record.status in _FINE else "FAILED"
            client.set_terminated(run, status, int(record.finished_at * 1000) or None)
        except Exception:
            with contextlib.suppress(Exception):
                client.delete_run(run)
            raise
        return run

    def end(
        self,
        status: EndStatus,
        artifacts: Sequence[Path],
        metrics: Mapping[str, float],
        curves: Sequence[Curve],
        ended: threading.Event,
    ) -> None:
        """End the sweep's run with its files, numbers and curves, and refresh the database's statistics."""
        client = self.connect()
        try:
            for name, value in metrics.items():
                client.log_metric(self._parent, _name(name), value)
            for file in artifacts:
                if file.is_file():
                    client.log_artifact(self._parent, str(file), _place(file, self.sweep.folder))
            if curves:
                self._keep_curves(client, curves)
        finally:
            client.set_terminated(self._parent, status)
        ended.set()
        if (path := database_file(self._uri)) is not None:
            # Without them sorting by a metric takes 4 s at 10,000 runs instead of 0.2 s.
            with contextlib.closing(sqlite3.connect(path, timeout=2)) as database:
                database.execute("PRAGMA analysis_limit=400")
                database.execute("ANALYZE")

    def _keep_curves(self, client: "MlflowClient", curves: Sequence[Curve]) -> None:
        """A run a curve, of which the steps are lengths; those that are there already stay, others of the sweep go."""
        wanted = {_digest(curve): curve for curve in curves}
        for digest, run in list(self._curves):
            if wanted.pop(digest, None) is None:
                client.delete_run(run)
        for digest, curve in wanted.items():
            self._create_curve(client, curve, digest)

    def _create_curve(self, client: "MlflowClient", curve: Curve, digest: str) -> None:
        from mlflow.entities import Metric, Param

        own = {"kind": "curve", "sweep": self.sweep.name, "label": curve.label, "curve": digest}
        tags = {f"attn_exp.{key}": value for key, value in own.items()} | {"mlflow.parentRunId": self._parent}
        moment_ms = int(curve.moment * 1000)
        run = str(client.create_run(self._experiment, moment_ms, _cut(tags | _source()), curve.name).info.run_id)
        points = [
            Metric(_name(name), value, moment_ms, step)
            for name, values in curve.points.items()
            for step, value in values
            if math.isfinite(value)
        ]
        params = [Param(_name(key), value[:_PARAM_LENGTH]) for key, value in curve.params.items()]
        try:
            for begin in range(0, len(points), _METRICS_BATCH):
                client.log_batch(run, points[begin : begin + _METRICS_BATCH], params if begin == 0 else ())
            client.set_terminated(run, "FINISHED", moment_ms)
        except Exception:
            with contextlib.suppress(Exception):
                client.delete_run(run)
            raise

    def _open_experiment(self, client: "MlflowClient") -> str:
        found = client.get_experiment_by_name(self._experiment_name)
        if found is None:
            return client.create_experiment(self._experiment_name, artifact_location=self._artifacts)
        if found.lifecycle_stage == "deleted":
            raise RuntimeError(f"experiment {self._experiment_name} is deleted there: restore it, or choose another")
        return str(found.experiment_id)

    def _open_parent(self, client: "MlflowClient") -> str:
        """The sweep's run: the one it had if it is resumed, together with the runs of its jobs, else a new one."""
        # The folder is part of a sweep's identity: on a shared server two people's sweeps may have one name.
        identity = {"attn_exp.sweep": self.sweep.name, "attn_exp.folder": str(self.sweep.folder.absolute())}
        own = {"attn_exp.command": redacted(self.sweep.command), "attn_exp.version": attn_exp.__version__}
        found = self._search(client, identity | {"attn_exp.kind": self.sweep.kind})
        if not found:
            all_tags = identity | own | {"attn_exp.kind": self.sweep.kind} | _source()
            return str(client.create_run(self._experiment, tags=_cut(all_tags), run_name=self.sweep.name).info.run_id)
        parent = str(found[-1].info.run_id)
        client.update_run(parent, "RUNNING")
        for key, value in _cut(own).items():
            client.set_tag(parent, key, value)
        self._runs.clear()
        self._curves.clear()
        for run in self._children(client, parent):
            if run.tags.get(KIND) == "curve":
                self._curves.append((run.tags.get(CURVE, "") if run.status == "FINISHED" else "", run.run))
                continue
            finished = run.tags.get(FINISHED_AT) if run.status != "RUNNING" else None
            self._runs.setdefault(run.tags.get(JOB, ""), []).append((run.run, finished))
        return parent

    def _children(self, client: "MlflowClient", parent: str) -> list[StoredRun]:
        if (path := database_file(self._uri)) is not None:
            return stored_in_database(path, parent)
        found = self._search(client, {"mlflow.parentRunId": parent})
        return [StoredRun(run.info.run_id, run.info.status, run.data.tags) for run in found]

    def _search(self, client: "MlflowClient", wanted: Mapping[str, str]) -> "list[Run]":
        condition = " and ".join(f"tags.`{key}` = {_quoted(value)}" for key, value in wanted.items())
        found: list[Run] = []
        token = None
        while True:
            # Small pages: a thousand runs at once take 100 MB on their way through the database layer.
            page = client.search_runs([self._experiment], condition, max_results=100, page_token=token)
            found += page
            token = page.token
            if not token:
                return found


def _log_batches(client: "MlflowClient", run: str, record: Record) -> None:
    from mlflow.entities import Metric, Param

    moment_ms = int(record.finished_at * 1000)
    of_metrics = [Metric(_name(key), value, moment_ms, 0) for key, value in metrics(record).items()]
    of_params = [Param(_name(key), value[:_PARAM_LENGTH]) for key, value in params(record).items()]
    while of_metrics or of_params:
        client.log_batch(run, of_metrics[:_METRICS_BATCH], of_params[:_PARAMS_BATCH])
        of_metrics, of_params = of_metrics[_METRICS_BATCH:], of_params[_PARAMS_BATCH:]


def _place(file: Path, folder: Path) -> str | None:
    """Where a file of the sweep lies among the run's: as in the sweep's folder."""
    own = file.parent
    return own.relative_to(folder).as_posix() if own != folder and own.is_relative_to(folder) else None


def _digest(curve: Curve) -> str:
    """What tells a curve from any other, so that the same sweep again stores none twice."""
    what = [curve.name, sorted(curve.params.items()), sorted(curve.points.items())]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _name(key: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", key)


def _cut(values: Mapping[str, str]) -> dict[str, str]:
    return {_name(key): value[:_TAG_LENGTH] for key, value in values.items()}


def _quoted(value: str) -> str:
    quote_mark = '"' if "'" in value else "'"
    return f"{quote_mark}{value}{quote_mark}"


def _source() -> dict[str, str]:
    user = user_name()
    return {"mlflow.source.name": "attn_exp"} | ({"mlflow.user": user} if user else {})


def _make_writable(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}): choose another place with {option}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written: choose another place with {option}")
