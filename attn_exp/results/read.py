"""Read sweeps: find their folders by name or path, and decode their records."""

import fnmatch
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_exp.core.case.fields import case_columns
from attn_exp.core.errors import RecordError, UserError, nearest
from attn_exp.core.files import read_whole, short_text
from attn_exp.core.record.file import FILE_NAME
from attn_exp.core.record.record import Record
from attn_exp.core.redaction import redacted
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.core.sheet.web import html_table
from attn_exp.core.text import SHORT, figures
from attn_exp.results.cell import passes_shown
from attn_exp.results.result import Result, decode, named
from attn_exp.results.store import planned_jobs
from attn_exp.results.there import HOME, baselines_in, baselines_of, sweeps_in

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Sweep:
    """The results of one sweep, ordered by job name.

    `broken` says which files could not be read, and why; `command` is the command that measured it, empty if unknown.
    `planned` is how many jobs that command is for, None if unknown.
    """

    name: str
    place: str
    results: tuple[Result, ...]
    broken: tuple[str, ...] = ()
    command: str = ""
    planned: int | None = None

    def __repr__(self) -> str:
        parts = [counted_of(len(self.results), self.planned, "record")]
        statuses = Counter(result.status for result in self.results)
        parts[0] += f" ({', '.join(f'{n} {status}' for status, n in statuses.most_common())})" if statuses else ""
        parts += self.devices
        parts += [f"{len(self.broken)} broken"] if self.broken else []
        return f"<Sweep {self.name}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        passes = passes_shown(self.results)
        rows = [
            {"backend": result.label, "case": result.case.label(), "status": result.status}
            | {
                f"{SHORT[direction]} us": figures(us) if (us := result.metrics.get(f"{direction}/time_us")) else ""
                for direction in passes
            }
            for result in named(self.results)
        ]
        return html_table(repr(self), sheet_of(rows))

    @property
    def when(self) -> float:
        """The time at which its last job ended, in seconds since 1970. Sweeps are ordered by it."""
        return max((result.finished_at for result in self.results), default=0.0)

    @property
    def devices(self) -> list[str]:
        """The names of the devices on which it was measured."""
        return sorted({result.device_name for result in self.results} - {""})

    def records(self) -> Iterator[Record]:
        """Yield the whole records, samples included, one at a time. Raises RecordError if one was deleted."""
        for result in self.results:
            yield result.record()

    def to_frame(self) -> "pandas.DataFrame":
        """Return a pandas DataFrame with a row per record and pass: names, case, status, flags and metrics.

        Raises UserError if pandas is not installed.
        """
        return frame([row for result in self.results for row in _rows(result)])


def sweep_folders(words: Sequence[str], home: Path = Path(HOME), *, baselines: bool = False) -> list[Path]:
    """Return the folders that names, patterns (`nightly-*`) or paths select, in the order typed.

    With `baselines` a name may be that of a baseline, too. Raises UserError if there is no such sweep. The message
    suggests the nearest name.
    """
    selected: list[Path] = []
    kept = baselines_in(home) if baselines else []
    for word in words:
        folders = _folders(word, home)
        if word in kept:
            own = baselines_of(home) / word
            if folders:
                raise UserError(f"'{word}' is a sweep and a baseline: write {folders[0]} or {own}")
            folders = [own]
        if not folders:
            there = [path.name for path in sweeps_in(home)]
            raise UserError(_no_sweep(word, home, there, kept))
        selected += [folder for folder in folders if folder not in selected]
    return selected


def read_folder(folder: Path, *, may_be_empty: bool = False) -> Sweep:
    """Return the results in a sweep's folder, decoding each record once.

    Raises UserError if the folder cannot be read, or has no records although it may not be empty.
    """
    try:
        with os.scandir(folder) as entries:
            # The second is false for a link that leads in circles, where the first raises.
            jobs = sorted(
                entry.name for entry in entries if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path)
            )
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): check its permissions") from error
    read = read_files((folder / job / FILE_NAME for job in jobs), missing_is_broken=False)
    if not may_be_empty and not read[0] and not read[1]:
        raise UserError(f"{folder} has no records yet: give a sweep's folder, such as {HOME}/NAME")
    return Sweep(folder.name, str(folder), *read, typed_command(folder), planned_jobs(folder))


def typed_command(folder: Path) -> str:
    """Return the command that `command.txt` in a sweep's folder has; empty if there is none."""
    return redacted(short_text(folder / "command.txt"))


def read_files(paths: Iterable[Path], *, missing_is_broken: bool) -> tuple[tuple[Result, ...], tuple[str, ...]]:
    """Return the results in record files, and a sentence for each file that could not be read."""
    results, broken = [], []
    for path in paths:
        try:
            results.append(decode(read_whole(path), path))
        except FileNotFoundError:
            if missing_is_broken:
                broken.append(f"{path} does not exist")
        except OSError as error:
            broken.append(f"{path} cannot be read: {error.strerror}")
        except RecordError as error:
            broken.append(str(error))
    return tuple(results), tuple(broken)


def frame(rows: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return rows as a pandas DataFrame, which is imported only here. Raises UserError if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise UserError("data frames need pandas, which is not installed: pip install pandas") from error
    return pandas.DataFrame(list(rows))


def counted_of(n: int, planned: int | None, noun: str) -> str:
    """Return how many there are: `91 records`, or `91 of 128 records` of a sweep that was stopped or still runs."""
    every = planned if planned is not None and planned > n else n
    return f"{n} {f'of {every} ' if every > n else ''}{noun}{'' if every == 1 else 's'}"


def _rows(result: Result) -> list[dict[str, Any]]:
    case = {name: getattr(result.case, name) for name in case_columns()}
    rows = []
    for direction in result.measuring.passes:
        own = {name.partition("/")[2]: value for name, value in result.metrics.items() if name.startswith(direction)}
        rows.append(
            {"sweep": result.sweep, "job": result.job, "backend": result.label, "model": result.model}
            | case
            | {"pass": direction, "status": result.status, "reason": result.reason, "device": result.device}
            | {"timer": result.measuring.timer, "gpu": result.device_name, "flags": " ".join(result.flags)}
            | {"kernel": result.longest_kernel(direction) or None, "finished_at": result.finished_at}
            | own
        )
    return rows


def _no_sweep(word: str, home: Path, there: Sequence[str], kept: Sequence[str]) -> str:
    if Path(word).is_file() and ".tar" in Path(word).suffixes:
        place = shlex.quote(str(home))
        return f"'{word}' is an archive: mkdir -p {place} && tar -xf {shlex.quote(word)} -C {place}"
    if not there and not kept:
        return f"there is no sweep '{word}': {home}/ has none yet (folder=FOLDER looks elsewhere)"
    known = f"the sweeps in {home} are {', '.join(there[-8:])}" if there else f"{home}/ has no sweep"
    known += f"; the baselines are {', '.join(kept[:8])}" if kept else ""
    known += "; a folder's path works too"
    if _is_pattern(word):
        return f"no sweep in {home} matches '{word}': {known}"
    return f"there is no sweep{' or baseline' if kept else ''} '{word}': {nearest(word, [*there, *kept])}{known}"


def _is_pattern(word: str) -> bool:
    return any(mark in word for mark in "*?[")


def _folders(word: str, home: Path) -> list[Path]:
    if _is_pattern(word):
        return [path for path in sweeps_in(home) if fnmatch.fnmatchcase(path.name, word)]
    # A name that is too long for a file, or has a zero byte, is none; `Path.is_dir` raises.
    return [path for path in (home / word, Path(word)) if word and os.path.isdir(path)][:1]
