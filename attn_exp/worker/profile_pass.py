"""Second pass: one profiler after another over a job that has been timed and whose record is written."""

import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.backends.package import Unavailable
from attn_exp.core.profile import Profile, profile_folder
from attn_exp.core.record import Record, write_record
from attn_exp.profilers.base import Subject, load_profiler
from attn_exp.worker.attempt import sentence
from attn_exp.worker.device import Machine
from attn_exp.worker.nvtx import marked
from attn_exp.worker.prepare import PreparedBackend

_MB = 1e6


def profile_job(
    record: Record, prepared: PreparedBackend, machine: Machine, job: Path, announce: Callable[[], None]
) -> Record:
    """The record with a profile for each profiler that its request names, written into `job` after each of them.

    `announce` is called before each, so that whoever waits counts its time anew. The death of the process alone
    escapes; the record of the timing is on disk by then.
    """
    for options in record.request.profilers:
        announce()
        name = str(options["name"])
        folder = profile_folder(job, name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subject = Subject(record, prepared.backend, prepared.calls, prepared.scope, machine.gpu, job, folder)
        began = time.perf_counter()
        with marked("job", record.request.job, machine.device), marked("phase", f"profile-{name}", machine.device):
            found = run_profiler(partial(_profiled, options, subject), job, folder)
        found = _bounded(found, job, record.request.profiler_limit_mb)
        found = replace(found, seconds=round(time.perf_counter() - began, 6))
        record = replace(record, profiles=record.profiles | {name: found})
        write_record(record, job)
    return record


def run_profiler(profile: Callable[[], Profile], job: Path, folder: Path) -> Profile:
    """What `profile` returns, or what it raises as a status and a sentence; the death of the process alone escapes."""
    try:
        return profile()
    except Unavailable as error:
        return Profile(status="unavailable", reason=str(error), files=_files(job, folder))
    except ImportError as error:
        return Profile(status="unavailable", reason=f"a package is missing: {error}", files=_files(job, folder))
    except Exception as error:  # a profiler may raise anything, and the timing must stay
        traceback.print_exc()
        return Profile(status="failed", reason=sentence(error), files=_files(job, folder))


def _profiled(options: dict[str, Any], subject: Subject) -> Profile:
    """What it found, as a reader of the record will have it: what JSON has no word for would make all of it unreadable.

    Raises:
        TypeError: it is no profile that a record can hold; of a float that is not a number JSON makes `null`.
    """
    found = load_profiler(options).profile(subject)
    try:
        return msgspec.json.decode(msgspec.json.encode(found), type=Profile)
    except (msgspec.ValidationError, TypeError) as error:
        raise TypeError(f"a record cannot hold what profiler={options['name']} found: {error}") from error


def _files(job: Path, folder: Path) -> tuple[str, ...]:
    """What lies there, of a profiler that did not come to say it."""
    return tuple(sorted(str(path.relative_to(job)) for path in folder.rglob("*") if path.is_file()))


def _bounded(found: Profile, job: Path, limit_mb: float) -> Profile:
    """The profile without files above the limit, which are removed and named, or never written; the rest is kept."""
    said = [found.reason] if found.reason else []
    kept = []
    for name in found.files:
        path = job / name
        if not path.is_file():
            said.append(f"{name} is not there")
            continue
        size_mb = path.stat().st_size / _MB
        if size_mb <= limit_mb:
            kept.append(name)
            continue
        path.unlink()
        said.append(f"{path.name} of {size_mb:.4g} MB was removed, being above profiler_limit_mb={limit_mb:g}")
    return replace(found, files=tuple(kept), reason="; ".join(said) or None)
