"""Measure the job folder that is given as an argument: `python -m attn_exp.worker FOLDER`.

FOLDER has a `request.yaml`, or the `duel.yaml` of a duel.

`--serve` reads job folders from standard input, each as a line of JSON. It answers each on the file descriptor of
`--reply-fd`; FOLDER is the line that was read. `begin FOLDER` comes first; `check FOLDER`, `compile FOLDER` or `time
FOLDER` when the job begins that; `profile FOLDER` before each profiler (the record is written by then). `end FOLDER`
comes last, or `poisoned FOLDER` if this process can no longer measure. `outdated FOLDER` means that files of a loaded
backend have changed: another process has to measure the job. All other output goes into the job's `worker.log`.

`--once` times nothing. It calls each pass once, warm, between `cudaProfilerStart` and `cudaProfilerStop` and in an NVTX
range. External profilers use it: `ncu --profile-from-start off python -m attn_exp.worker --once FOLDER`.
"""

import argparse
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from attn_exp.core.errors import RecordError, UserError
from attn_exp.core.files import be_as_private_as
from attn_exp.core.host.process import die_with_parent, end_with, limit_memory, prefer_to_be_killed
from attn_exp.core.record.file import LOG_NAME, write_record
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import DUEL_NAME, REQUEST_NAME, read_requests

if TYPE_CHECKING:
    from attn_exp.worker.machine.device import Machine


def run_folder(
    folder: Path,
    machine: "Machine | None",
    announce: Callable[[str], None] = lambda stage: None,
    *,
    present: bool = False,
) -> "tuple[Machine | None, bool]":
    """Measure the jobs of a folder, write their records, then run the profilers.

    `announce` is called with the stage that begins, `profile` before each profiler. With `present`, backends are
    measured as they are now, whatever their source was when the job was made.

    Returns:
        The machine for the next job, None if there is none, and whether this process can measure another job.
    """
    from attn_exp.backends.package import Unavailable
    from attn_exp.worker.attempt import is_poisoned
    from attn_exp.worker.loaded import with_present_source
    from attn_exp.worker.machine.device import Machine
    from attn_exp.worker.measure import measure_and_keep, measure_interleaved

    began = time.perf_counter()
    jobs = read_requests(folder)
    if present:
        jobs = [(with_present_source(request), target) for request, target in jobs]
    first = jobs[0][0]
    if machine is None or machine.device != first.device:
        if first.gpu_uuid is not None:
            # Before CUDA is initialised.
            os.environ["CUDA_VISIBLE_DEVICES"] = first.gpu_uuid
        try:
            machine = Machine.open(first.device)
        except Unavailable as error:
            for request, target in jobs:
                target.mkdir(exist_ok=True)
                write_record(Record(request=request, status="unavailable", reason=str(error)), target)
            return None, True
    opened_s = time.perf_counter() - began
    prepared, machine.announce = None, announce
    if len(jobs) == 1:
        record, prepared = measure_and_keep(first, machine)
        records = [record]
    else:
        records = measure_interleaved([request for request, _ in jobs], machine)
    for record, (_, target) in zip(records, jobs, strict=True):
        record.stages_s["open"] = round(opened_s, 6)
        record.stages_s["total"] = round(time.perf_counter() - began, 6)
        target.mkdir(exist_ok=True)
        write_record(record, target)
    if prepared is not None and first.profilers:
        from attn_exp.worker.profile_pass import profile_job

        records = [profile_job(records[0], prepared, machine, folder, announce)]
    profiles = [profile for record in records for profile in record.profiles.values()]
    failed = any(record.status == "error" for record in records) or any(one.status == "failed" for one in profiles)
    machine.settings.restore()
    return machine, not (failed and is_poisoned(first.device))


def serve(reply_fd: int) -> None:
    """Measure the folders that arrive on standard input, each as a line of JSON, until it ends."""
    replies = os.fdopen(reply_fd, "w", buffering=1, encoding="utf-8")
    # Imports make objects that stay: looking through them again and again for garbage takes a tenth of the time.
    gc.disable()
    import attn_exp.worker.measure  # noqa: F401  (the seconds of importing torch, before the first job is known)
    from attn_exp.worker.loaded import is_outdated

    # Imported modules stay, so later collections need not scan them; a collection then takes a millisecond.
    gc.freeze()
    gc.enable()
    machine: Machine | None = None
    replies.write("ready\n")
    for line in sys.stdin:
        # As JSON, since a folder's name may have line breaks and bytes that are not UTF-8.
        name = line.rstrip("\n")
        folder = Path(json.loads(name))
        replies.write(f"begin {name}\n")
        be_as_private_as(folder)
        _log_into(folder)
        jobs = read_requests(folder)
        if is_outdated([request for request, _ in jobs]):
            replies.write(f"outdated {name}\n")
            return
        if jobs[0][0].device == "cpu":
            limit_memory()
        machine, fit = run_folder(folder, machine, partial(_announce, replies, name))
        sys.stdout.flush()
        sys.stderr.flush()
        replies.write(f"{'end' if fit else 'poisoned'} {name}\n")
        if not fit:
            return


def _announce(replies: TextIO, name: str, stage: str) -> None:
    replies.write(f"{stage} {name}\n")


def _log_into(folder: Path) -> None:
    """Redirect everything that this process prints, native code included, into the job's log."""
    log = os.open(folder / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def measure_again(folder: Path, *, once: bool) -> int:
    """Measure the job of a folder, or with `once` call each of its passes once; return 0."""
    if not ((folder / REQUEST_NAME).exists() or (folder / DUEL_NAME).exists()):
        raise UserError(f"{folder} has no {REQUEST_NAME}: give a job's folder, as multirun/SWEEP/JOB")
    faulthandler.enable()
    try:
        if once:
            from attn_exp.worker.run_once import run_once

            run_once(read_requests(folder)[0][0])
        else:
            run_folder(folder, None, present=True)
    except RecordError as error:
        raise UserError(str(error)) from error
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the worker's command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m attn_exp.worker", description="Measure a job again.")
    parser.add_argument("folder", nargs="?", type=Path, help="a job's folder, with its request.yaml")
    parser.add_argument("--once", action="store_true", help="call each pass once, for external profilers; time nothing")
    # For the parent: read folders from standard input and answer on a file descriptor; end with another process.
    for name in ("--reply-fd", "--parent", "--until"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve != (given.folder is None) or (given.serve and given.once):
        parser.error("give a job's folder, or --serve")
    faulthandler.enable()
    if given.parent is not None:
        # Ctrl-C reaches the whole foreground process group; the parent decides how to react.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(given.parent)
        prefer_to_be_killed()
    if given.until is not None:
        end_with(given.until)
    if given.serve:
        serve(given.reply_fd)
        return 0
    try:
        return measure_again(given.folder, once=given.once)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    # Skip the interpreter's teardown: with a poisoned context or CUDA libraries loaded it may take seconds.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
