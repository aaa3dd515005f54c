"""Replay: store records that were measured before in MLflow."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.core.errors import RecordError, UserError, is_inside
from attn_exp.core.files import be_as_private_as
from attn_exp.core.record.profile import FOLDER as PROFILES
from attn_exp.core.record.request import DUEL_NAME
from attn_exp.execution.closing import FOLDER as PLOTS
from attn_exp.execution.closing import REPORT, plots_and_curves, ranked_rivals, write_report
from attn_exp.execution.summary import curves, summary_of
from attn_exp.results.read import Sweep, read_folder, typed_command
from attn_exp.results.table import write_tables
from attn_exp.tracking.base import SweepInfo

if TYPE_CHECKING:
    from attn_exp.tracking.runs import Runs

# The files of a sweep as a whole.
_OF_A_SWEEP = ("table.txt", "table.csv", "command.txt", REPORT, f"{PLOTS}/*")
# After so many failures in a row the store is taken to be gone.
_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The result of one folder: how many records are new, were there already, or are lacking, with the last reason.

    `broken` says which files are no records, and `notes` are events in the database and its files, as sentences.
    """

    name: str
    new: int = 0
    there: int = 0
    lacking: int = 0
    error: Exception | None = None
    broken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def replay(folder: Path, runs_of: "Callable[[SweepInfo], Runs]") -> Replayed:
    """Store the records of the sweep in a folder that the store does not have.

    Raises UserError if there is no record in the folder, or it is a duel's, or the store's location is invalid, and any
    Exception if the store cannot be opened.
    """
    if (folder / DUEL_NAME).is_file():
        raise UserError(f"{folder.name} is a duel, and MLflow has sweeps: attn-exp compare SWEEP counts it")
    be_as_private_as(folder)
    sweep = read_folder(folder)
    latest = max(sweep.results, key=lambda result: result.finished_at, default=None)
    name = latest.sweep if latest else folder.name
    began = min((result.started_at for result in sweep.results), default=time.time())
    runs = runs_of(SweepInfo(name=name, folder=folder, command=typed_command(folder), began=began))
    runs.connect()
    return replace(_sweep(runs, sweep, folder), notes=tuple(filter(None, (runs.moved,))))


def _sweep(runs: "Runs", sweep: Sweep, folder: Path) -> Replayed:
    new = there = lacking = failures = 0
    last: Exception | None = None
    broken = list(sweep.broken)
    of_jobs: dict[str, list[Path]] = {}
    for result in sweep.results:
        job = result.path.parent
        try:
            if not is_inside(result.path, folder):
                raise RecordError(f"{result.path} is a link that leads out of the sweep's folder")
            record = result.record()
        except RecordError as error:
            broken.append(str(error))
            continue
        if failures >= _FAILURES_IN_A_ROW:
            lacking += 1
            continue
        # The store's libraries may raise anything: count what is lacking, and try the rest.
        try:
            added = runs.add(record, job)
        except Exception as error:
            lacking, failures, last = lacking + 1, failures + 1, error
            continue
        new, there, failures = new + added, there + (not added), 0
        if record.profiles:
            # The pages that the sweep's end writes about it; its profilers' files are stored with its record.
            of_jobs[job.name] = list(_files(job, [f"{PROFILES}/*"]))
    try:
        # A store that lacks a description has all records: nothing is said.
        rivals = ranked_rivals(sweep, lambda line: None)
        if not (folder / "table.csv").exists():
            with contextlib.suppress(OSError):
                write_tables(sweep.results, folder)
        if not (folder / REPORT).exists():
            write_report(rivals, plots_and_curves(sweep, rivals, lambda line: None)[0], folder, lambda line: None)
        summary = replace(
            summary_of(sweep.results, rivals, lambda line: None, sweep.planned),
            files=list(_files(folder, _OF_A_SWEEP)),
            curves=curves(sweep.results),
            job_files=of_jobs,
        )
        runs.end("FINISHED", summary, ended=sweep.when or None)
    except Exception as error:
        last = last or error
    return Replayed(name=runs.sweep.name, new=new, there=there, lacking=lacking, error=last, broken=tuple(broken))


def _files(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())
