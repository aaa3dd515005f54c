"""Run the requested profilers over a job whose record is written."""

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.files import remove
from attn_exp.core.record.file import write_record
from attn_exp.core.record.profile import Profile, profile_folder
from attn_exp.core.record.record import Record
from attn_exp.profilers.base import Subject, load_profiler
from attn_exp.worker.attempt import marked, status_of
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.prepare import PreparedBackend

_MB = 1e6


def profile_job(
    record: Record, prepared: PreparedBackend, machine: Machine, job: Path, announce: Callable[[str], None]
) -> Record:
    """Run each profiler of the request; return the record with their profiles, rewritten into `job` after each.

    `announce` is called with `profile` before each profiler, so that the parent restarts its timeout. No exception
    escapes; if the process dies, the record of the timing is on disk.
    """
    for options in record.request.profilers:
        announce("profile")
        name = str(options["name"])
        folder = profile_folder(job, name)
        remove(folder)  # a link, too
        folder.mkdir(parents=True)
        began = time.perf_counter()
        with marked("job", record.request.job, machine.device), marked("phase", f"profile-{name}", machine.device):
            look = partial(_profiled, options, partial(subject_of, record, prepared, machine, job, folder))
            profile = run_profiler(look, job, folder)
        profile = _bounded(profile, job, record.request.profiler_limit_mb)
        profile = replace(profile, seconds=round(time.perf_counter() - began, 6))
        record = replace(record, profiles=record.profiles | {name: profile})
        write_record(record, job)
    return record


def subject_of(record: Record, prepared: PreparedBackend, machine: Machine, job: Path, folder: Path) -> Subject:
    """Return a timed job as a profiler sees it."""
    calls = prepared.calls_of(record.passes)
    return Subject(record, prepared.backend, calls, prepared.scope, machine.gpu, job, folder)


def run_profiler(profile: Callable[[], Profile], job: Path, folder: Path) -> Profile:
    """Return the profile, or a failed one with a reason if `profile` raises."""
    try:
        return profile()
    except Exception as error:  # a profiler may raise anything, and the timing must stay
        status, reason = status_of(error, "")
        if status != "unavailable":
            traceback.print_exc()
        files = tuple(sorted(str(path.relative_to(job)) for path in folder.rglob("*") if path.is_file()))
        return Profile(status="unavailable" if status == "unavailable" else "failed", reason=reason, files=files)


def _profiled(options: dict[str, Any], subject: Callable[[], Subject]) -> Profile:
    """Run one profiler; return its profile as it will be read. A faulty one must not make the record unreadable."""
    profile = load_profiler(options).profile(subject())
    try:
        profile = msgspec.json.decode(msgspec.json.encode(profile), type=Profile)
    except (msgspec.ValidationError, TypeError) as error:
        raise TypeError(f"a record cannot hold the profile of profiler={options['name']}: {error}") from error
    return profile


def _bounded(profile: Profile, job: Path, limit_mb: float) -> Profile:
    """Delete files above the limit; return the profile without them and missing files, which the reason names."""
    reasons = [profile.reason] if profile.reason else []
    kept = []
    for name in profile.files:
        path = job / name
        if not path.is_file():
            reasons.append(f"{name} is missing")
            continue
        size_mb = path.stat().st_size / _MB
        if size_mb <= limit_mb:
            kept.append(name)
            continue
        path.unlink()
        reasons.append(f"{path.name} of {size_mb:.4g} MB was removed: it exceeds profiler_limit_mb={limit_mb:g}")
    return replace(profile, files=tuple(kept), reason="; ".join(reasons) or None)
