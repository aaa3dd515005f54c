"""Store records as MLflow runs: one parent run per sweep and one child run per job, in a background thread.

A job's run is created when the job is done, in one step, so a killed process leaves no job RUNNING.
"""

import math
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError
from attn_exp.core.record.file import sound_record
from attn_exp.core.record.record import Record
from attn_exp.tracking.background import Background
from attn_exp.tracking.base import EndStatus, Summary, SweepInfo, Tracker
from attn_exp.tracking.database import database_file
from attn_exp.tracking.location import DEFAULT_URI, MlflowPlace, absolute_uri, is_server
from attn_exp.tracking.runs import Runs
from attn_exp.tracking.trouble import refusal, trouble

# Share of the time limit at the end that records get; the rest is for the sweep's run.
_FLUSH_SHARE = 0.6


class MlflowTracker(Tracker):
    """Stores the records of a sweep in MLflow. `config` has the keys of `conf/tracker/mlflow.yaml`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._place = MlflowPlace(config)
        self._runs: Runs | None = None
        self._sweep: SweepInfo | None = None
        self._thread: Background | None = None
        self._stored: Runs | None = None
        self._moved: str | None = None
        # Jobs that are not stored yet, with their folders; the thread removes them.
        self._waiting: dict[str, Path] = {}

    def open(self, sweep: SweepInfo) -> str | None:
        """Check the location, then import MLflow and open the store in the background.

        Wait for a server or a database server.
        """
        self._runs, self._sweep = Runs(self._place, sweep), sweep
        self._place.check()
        thread = self._thread = Background("mlflow", self._place.patience_s)
        self._runs.answered = thread.answered
        began = time.monotonic()
        thread.put_own(self._runs.prepare)
        thread.put(self._runs.connect)
        if database_file(self._place.uri) is not None and not self._place.elsewhere:
            return None
        if thread.settle() and not thread.errors:
            return None
        waited_s = time.monotonic() - began
        reason = f"no answer within {waited_s:.0f} s"
        if thread.errors:
            error = thread.errors[0]
            if (refused := refusal(error)) is not None:
                error = UserError(f"MLflow at {self._place.shown} {refused}, or use tracker=none")
            if isinstance(error, UserError):
                thread.stop()
                self._runs = self._thread = None
                raise error
            reason = trouble(error)
        return (
            f"MLflow at {self._place.shown} stores nothing yet ({reason}): the sweep continues, and its records are in "
            f"{sweep.folder}; if it does not recover, store them with: {self.replay_command()}"
        )

    def where(self) -> str | None:
        """Return the store's address and its experiment; None for the database of this folder."""
        if (self._place.uri, self._place.experiment) == (absolute_uri(DEFAULT_URI), "attn_exp"):
            return None
        return f"logging to MLflow at {self._place.shown}, experiment {self._place.experiment}"

    def log(self, record: Record, folder: Path) -> None:
        """Queue a finished job."""
        if self._runs is not None and self._thread is not None:
            self._waiting[record.request.job] = folder
            self._thread.put(lambda: self._add(record, folder))

    def quiet(self) -> None:
        """Wait for a database of this host; a server is waited for while nothing is computed."""
        if database_file(self._place.uri) is not None:
            self.settle()

    def settle(self) -> None:
        """Wait until everything queued is stored."""
        if self._thread is not None:
            self._thread.settle()

    def note(self) -> str | None:
        """Return that the store's files are not where it looks for them."""
        return self._moved

    def look(self) -> str | None:
        """Return the address of the sweep's page on a server, or the command that opens a database at the sweep."""
        place = self._place
        if is_server(place.uri):
            pages = self._stored.pages if self._stored is not None else ("",)
            return " and ".join(f"at {place.shown}/{page}" for page in pages)
        words = [self._stored.sweep.name] if self._stored is not None else []
        words += [] if place.uri == absolute_uri(DEFAULT_URI) else [f"uri={place.shown}"]
        words += [] if place.experiment == "attn_exp" else [f"mlflow_experiment={place.experiment}"]
        return f"with: {shlex.join(['attn-exp', 'ui', *words])}"

    def close(
        self,
        status: EndStatus,
        summary: Summary = Summary(),  # noqa: B008 it is frozen
        timeout_s: float = math.inf,
        told: Callable[[str], None] = lambda text: None,
    ) -> str | None:
        """Store what is left and end the sweep's run; return a sentence if something is missing in MLflow."""
        runs, thread = self._runs, self._thread
        if runs is None or thread is None:
            return None
        ended = threading.Event()
        self._flush(thread, timeout_s * _FLUSH_SHARE, told)

        def end() -> None:
            runs.end(status, summary)
            self._stored, self._moved = runs, runs.moved
            ended.set()

        thread.put_always(end)
        thread.settle(timeout_s * (1 - _FLUSH_SHARE))
        thread.stop()
        # Not earlier: after an interrupt while waiting above, this may be called again with a shorter limit.
        self._runs = self._thread = None
        count = len(self._waiting)
        self.lacks = count > 0 or not ended.is_set()
        if ended.is_set() and not count:
            return None
        what = f"{count} record{'s' if count > 1 else ''}" if count else "the end of the sweep's run"
        path = database_file(self._place.uri)
        if path is not None and not path.exists():
            what, reason = "records", "its file was moved or deleted"
        elif thread.errors:
            reason = trouble(thread.errors[-1])
        else:
            reason = f"no answer within tracker.patience_s={self._place.patience_s:g}"
        return (
            f"MLflow at {self._place.shown} lacks {what} ({reason}): all records are in {runs.sweep.folder}; "
            f"store them with: {self.replay_command()}"
        )

    def _flush(self, thread: Background, limit_s: float, told: Callable[[str], None]) -> None:
        """Wait for the queue, then retry what is not stored, because the store may be back."""
        began = time.monotonic()
        each = lambda: told(f"storing records in MLflow: {len(self._waiting)} left")  # noqa: E731
        in_time = thread.settle(limit_s, each=each)
        thread.ask_again()
        if self._waiting:
            for folder in list(self._waiting.values()):
                thread.put(lambda folder=folder: self._add_again(folder))  # type: ignore[misc]
            in_time = thread.settle(max(0.0, limit_s - (time.monotonic() - began)), each=each)
        if not in_time:
            thread.give_up()

    def _add(self, record: Record, folder: Path) -> None:
        assert self._runs is not None
        self._runs.add(record, folder)
        self._waiting.pop(record.request.job, None)

    def _add_again(self, folder: Path) -> None:
        # It may be stored by now. A record that cannot be read was reported before.
        if folder in self._waiting.values() and (record := sound_record(folder)) is not None:
            self._add(record, folder)

    def replay_command(self) -> str | None:
        """Return the command that stores what is missing of the sweep that was opened."""
        return None if self._sweep is None else self._place.replay_command(self._sweep.folder)
