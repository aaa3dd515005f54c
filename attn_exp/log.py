"""python -m attn_exp.log [--config-dir FOLDER] SWEEP [SWEEP ...] [tracker=NAME] [tracker.KEY=VALUE] [folder=multirun]

Stores records into MLflow: those of a sweep whose server was away, of one without a tracker, or somebody else's. What
is there already is not stored again: the same command twice is the same as once, also while the sweep goes on.

  python -m attn_exp.log first                                     the sweep multirun/first, into mlruns/mlflow.db
  python -m attn_exp.log first second tracker=server               two sweeps, into the server of tracker=server
  python -m attn_exp.log 'nightly-*' tracker.uri=http://host:5000  those that match, into that server
  python -m attn_exp.log /data/sweeps/first duel-2026-03-01_12-00-00-ab12   folders anywhere; duels too

Exit codes: 0; 1 the store lacks some of it still; 2 something to type differently; 3 files that are no records were
skipped, and the rest is stored.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attn_exp.core.errors import is_inside
from attn_exp.core.profile import FOLDER as PROFILES
from attn_exp.core.record import DUEL_NAME, FILE_NAME, LOG_NAME, VERDICTS_NAME, Record, RecordError, read_record
from attn_exp.plots.curves import curves
from attn_exp.results.read import Sweep, read_folder
from attn_exp.tracking.base import SweepInfo, duel_metrics

if TYPE_CHECKING:
    from attn_exp.tracking.runs import Runs
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from attn_exp.config.compose import compose_config, split_config_dir
from attn_exp.core.errors import UserError
from attn_exp.core.redaction import redacted
from attn_exp.results.read import HOME, sweep_folders

if TYPE_CHECKING:
    from attn_exp.tracking.mlflow import MlflowPlace


# The whole sweep's files, beside those of its jobs.
_OF_A_SWEEP = ("table.txt", "table.csv", "command.txt", "plots/*")
# What was written about a profiled job at the sweep's end; its profilers' own files go with its record.
_OF_A_PROFILED_JOB = (f"{PROFILES}/*",)
_OF_A_DUEL = (DUEL_NAME, LOG_NAME, "command.txt", "duel.txt", VERDICTS_NAME, "ratios.png", f"*/{FILE_NAME}")
# So many failures in a row mean a store that is gone.
_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of one folder: records `new` to the store, `there` already, and `lacking`, with the last `error`.

    `broken` names each file that is no record, and why. A duel is one record here.
    """

    name: str
    kind: str
    new: int = 0
    there: int = 0
    lacking: int = 0
    error: Exception | None = None
    broken: tuple[str, ...] = ()


def replay(folder: Path, runs_of: "Callable[[SweepInfo], Runs]") -> Replayed:
    """Store what the store lacks of the sweep or duel in a folder.

    Raises:
        UserError: no record in the folder, or a place that cannot be meant.
        Exception: whatever the store raises when it is first asked.
    """
    sweep = read_folder(folder)
    kind = "duel" if (folder / DUEL_NAME).is_file() else "sweep"
    latest = max(sweep.results, key=lambda result: result.finished_at, default=None)
    name = latest.sweep if latest else folder.name
    began = min((result.started_at for result in sweep.results), default=time.time())
    runs = runs_of(SweepInfo(name=name, folder=folder, command=_command(folder), kind=kind, began=began))
    runs.connect()
    return _duel(runs, sweep, folder) if kind == "duel" else _sweep(runs, sweep, folder)


def _sweep(runs: "Runs", sweep: Sweep, folder: Path) -> Replayed:
    new = there = lacking = failures = 0
    last: Exception | None = None
    broken = list(sweep.broken)
    of_jobs: dict[str, list[Path]] = {}
    for result in sweep.results:
        job = result.path.parent
        try:
            record = _own_record(job, folder)
        except RecordError as error:
            broken.append(str(error))
            continue
        if failures >= _FAILURES_IN_A_ROW:
            lacking += 1
            continue
        # Whatever the store's libraries raise: what is lacking is counted, and the rest is tried.
        try:
            added = runs.add(record, job)
        except Exception as error:
            lacking, failures, last = lacking + 1, failures + 1, error
            continue
        new, there, failures = new + added, there + (not added), 0
        if record.profiles:
            of_jobs[job.name] = list(_files(job, _OF_A_PROFILED_JOB))
    try:
        files = list(_files(folder, _OF_A_SWEEP))
        runs.end("FINISHED", files, {}, curves(sweep.results), of_jobs, ended=_ended(sweep))
    except Exception as error:
        last = last or error
    return Replayed(
        name=runs.sweep.name, kind="sweep", new=new, there=there, lacking=lacking, error=last, broken=tuple(broken)
    )


def _duel(runs: "Runs", sweep: Sweep, folder: Path) -> Replayed:
    records, broken = [], list(sweep.broken)
    for result in sweep.results:
        try:
            records.append(_own_record(result.path.parent, folder))
        except RecordError as error:
            broken.append(str(error))
    measured = [record for record in records if record.status == "ok"]
    numbers = duel_metrics(measured, _verdicts(folder)) if len(measured) > 1 else {}
    try:
        runs.end(
            "FINISHED" if numbers else "FAILED", list(_files(folder, _OF_A_DUEL)), numbers, (), ended=_ended(sweep)
        )
    except Exception as error:
        return Replayed(name=runs.sweep.name, kind="duel", lacking=1, error=error, broken=tuple(broken))
    fresh = int(runs.fresh)
    return Replayed(name=runs.sweep.name, kind="duel", new=fresh, there=1 - fresh, broken=tuple(broken))


def _own_record(job: Path, folder: Path) -> Record:
    """The record in a job's folder. Raises RecordError also for one that belongs elsewhere."""
    path = job / FILE_NAME
    if not is_inside(path, folder):
        raise RecordError(f"{path} is a link that leads out of the sweep's folder")
    record = read_record(job)
    if record is None:
        raise RecordError(f"{path} is not there any more")
    if record.request.job != job.name:
        raise RecordError(f"{path} is the record of {record.request.job}: give its folder that name")
    return record


def _files(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())


def _verdicts(folder: Path) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """What a duel's folder says of its pairs; nothing if it says it no more."""
    kind = dict[str, list[dict[str, float | int | str | None]]]
    try:
        return msgspec.json.decode((folder / VERDICTS_NAME).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _command(folder: Path) -> str:
    path = folder / "command.txt"
    try:
        return path.read_text().strip() if is_inside(path, folder) else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _ended(sweep: Sweep) -> float | None:
    return sweep.when or None


LACKING, MISTAKE, SKIPPED, INTERRUPTED = 1, 2, 3, 130


def main(arguments: Sequence[str]) -> int:
    """Store the sweeps that the words name; the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else MISTAKE
    try:
        return _log(arguments)
    except UserError as error:
        print(f"attn_exp.log: {redacted(str(error))}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED


def _log(arguments: Sequence[str]) -> int:
    words, own_choices = split_config_dir(arguments)
    sweeps, overrides, home = _words(words)
    folders = sweep_folders(sweeps, Path(home))
    place = _place(overrides, own_choices)
    lacking = skipped = False
    for folder in folders:
        found = _replay(folder.resolve(), place)
        print(_sentence(found, place), flush=True)
        for broken in found.broken:
            print(f"skipped: {broken}", file=sys.stderr)
        lacking = lacking or found.error is not None
        skipped = skipped or bool(found.broken)
    return LACKING if lacking else SKIPPED if skipped else 0


def _words(arguments: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Sweeps, Hydra's overrides of the tracker, and the folder that sweeps are in."""
    sweeps, overrides, home = [], [], HOME
    for word in arguments:
        key, equals, value = word.partition("=")
        if equals and key == "folder":
            home = value
        elif equals and key.split(".")[0] == "tracker":
            overrides.append(word)
        elif equals and key == "sweep":
            raise UserError(f"a sweep needs no key here: python -m attn_exp.log {value}")
        elif equals or word.startswith("-"):
            raise UserError(f"'{word}' is no sweep and no option: the options are tracker=, tracker.uri=, folder=")
        else:
            sweeps.append(word)
    if not sweeps:
        raise UserError("there is nothing to store: name a sweep, for example python -m attn_exp.log first")
    return sweeps, overrides, home


def _place(overrides: Sequence[str], own_choices: Path | None) -> "MlflowPlace":
    from attn_exp.config.compose import plain
    from attn_exp.tracking.mlflow import MlflowPlace

    config = plain(compose_config(overrides, "log", own_choices))["tracker"]
    if config.get("name") != "mlflow":
        raise UserError(f"tracker={config.get('name')} stores nothing: choose tracker=mlflow or tracker=server")
    return MlflowPlace(config)


def _replay(folder: Path, place: "MlflowPlace") -> "Replayed":
    from attn_exp.tracking.trouble import refusal

    # A store that cannot be reached may raise whatever its libraries raise.
    try:
        return replay(folder, place.runs)
    except UserError:
        raise
    except Exception as error:
        refused = refusal(error)
        if refused is not None:
            raise UserError(f"MLflow at {place.shown} {refused}") from error
        return Replayed(name=folder.name, kind="sweep", error=error)


def _sentence(found: "Replayed", place: "MlflowPlace") -> str:
    from attn_exp.tracking.trouble import trouble

    if found.error is not None and not (found.new or found.there or found.lacking):
        return (
            f"{found.name}: MLflow at {place.shown} took nothing ({trouble(found.error)}); the same command tries again"
        )
    if found.kind == "duel" and not found.lacking:
        return f"{found.name}: the duel {'is new' if found.new else 'was there'} in MLflow at {place.shown}"
    count = found.new + found.there + found.lacking
    said = f"{found.name}: {count} record{'s' if count != 1 else ''}, {found.new} new, {found.there} there already"
    if found.error is None:
        return f"{said}, in MLflow at {place.shown}"
    lacks = f"{found.lacking} it still lacks" if found.lacking else "the end of the sweep's run is lacking"
    return f"{said}, {lacks}: MLflow at {place.shown}: {trouble(found.error)}; the same command goes on from there"


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main(sys.argv[1:]))
