"""Find what the user named: a job's folder, a sweep's folder, a job in a sweep, or an MLflow run."""

import re
from pathlib import Path

from attn_exp.core.errors import UserError, nearest
from attn_exp.core.record.file import FILE_NAME
from attn_exp.core.redaction import redacted
from attn_exp.results.read import Sweep, read_files, read_folder, sweep_folders
from attn_exp.results.result import Result
from attn_exp.tracking.location import DEFAULT_URI
from attn_exp.tracking.mlflow_read import read_run, read_store

_RUN = re.compile(r"[0-9a-f]{32}")


# A sweep, and the job of it that the page is about; None for a page about the sweep.
Found = tuple[Sweep, Result | None]


def find(word: str, home: Path, uri: str | None) -> Found:
    """Return what `word` names: a sweep, a job or an MLflow run.

    `home` is the folder that sweeps are in, `uri` the MLflow store to read instead of folders; runs are in the default
    store without it. Raises UserError if nothing has that name. The message suggests the nearest.
    """
    if _RUN.fullmatch(word):
        return _run(word, uri or DEFAULT_URI)
    if uri is not None:
        return _stored_sweep(word, uri)
    own = Path(word)
    if (own / FILE_NAME).is_file():
        return _in_sweep(own.resolve().parent, own.resolve().name)
    sweep, _, job = word.rstrip("/").partition("/")
    if job and not own.is_dir() and (home / sweep).is_dir():
        return _in_sweep(home / sweep, job)
    folders = sweep_folders([word], home)
    if len(folders) > 1:
        raise UserError(f"'{word}' names {len(folders)} sweeps: name one, such as {folders[0].name}")
    found = read_folder(folders[0])
    if not found.results:
        raise UserError(f"{folders[0]} has no readable record: give another sweep")
    only_one = len(found.results) == 1 and not found.broken
    return found, found.results[0] if only_one else None


def _in_sweep(folder: Path, name: str) -> Found:
    """Return a job in a sweep's folder by its name or by an unambiguous beginning of it."""
    sweep = read_folder(folder)
    jobs = {result.path.parent.name: result for result in sweep.results}
    matching = [job for job in jobs if job == name] or [job for job in jobs if job.startswith(name)]
    if len(matching) == 1:
        return sweep, jobs[matching[0]]
    if matching:
        raise UserError(f"{len(matching)} jobs begin with '{name}': type more of its name, {', '.join(matching[:6])}")
    broken = [sentence for sentence in sweep.broken if f"/{name}" in sentence]
    if broken:
        raise UserError(f"{broken[0]}: run the sweep again")
    there = ", ".join(sorted(jobs)[:8])
    raise UserError(f"there is no job '{name}' in {folder}: {nearest(name, jobs)}the jobs are {there}")


def _stored_sweep(name: str, uri: str) -> Found:
    """Return a sweep from the MLflow store. A job's page needs the run's files, which only its identifier finds."""
    if "/" in name:
        raise UserError(f"with uri= a job is named by its MLflow run: attn-exp explain RUN uri={redacted(uri)}")
    (sweep,) = read_store(uri, "attn_exp", [name])
    if not sweep.results:
        raise UserError(f"sweep '{name}' has no readable record in {redacted(uri)}: give another sweep")
    return sweep, None


def _run(run: str, uri: str) -> Found:
    path, experiment, sweep = read_run(uri, run)
    results, broken = read_files([path], missing_is_broken=True)
    if not results:
        raise UserError(f"run {run} has no readable record ({broken[0]}): give the job's folder instead")
    job = results[0]
    others = [other for one in read_store(uri, experiment, [sweep]) for other in one.results if other.job != job.job]
    return Sweep(sweep, redacted(uri), (job, *others)), job
