"""Measure the job folder that is given as an argument: `python -m attn_exp.worker FOLDER`.

FOLDER has a `request.yaml`, or the `duel.yaml` of a duel.

`--serve` reads runs from standard input, each as a line of JSON: the `folders` of jobs that are measured in turns, the
folder of a job `beside` them that has a record and is measured once more, and whether they are measured `apart` from
others of their case. It answers each on the file descriptor of `--reply-fd` with a word and what it is about, RUN, the
line that was read, or FOLDER, as JSON: `begin RUN` first; `check`, `compile` or `time` when a job begins that, with
RUN if all do; `done FOLDER` when a job has its record; `profile FOLDER` before each profiler (the record is written by
then). `end RUN` comes last, or `poisoned RUN` if this process can no longer measure. `outdated RUN` means that files of
a loaded backend have changed: another process has to measure these jobs. All other output goes into the jobs'
`worker.log`.

`--once` times nothing. It calls each pass once, warm, between `cudaProfilerStart` and `cudaProfilerStop` and in an NVTX
range. External profilers use it: `ncu --profile-from-start off python -m attn_exp.worker --once FOLDER`.
"""

import os
import sys

if __name__ == "__main__" and not os.environ.get("PYTHONSAFEPATH"):
    # The current folder comes last: a file secrets.py or numpy.py in it hides no module.
    sys.path = [*sys.path[not sys.flags.safe_path :], os.getcwd()]

import argparse
import faulthandler
import gc
import json
import signal
import time
from collections.abc import Callable, Sequence
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
    from attn_exp.worker.prepare import PreparedBackend


# Called with a stage, `done` or `profile`, and the job's folder, None if it is about all jobs of a run.
Announce = Callable[[str, Path | None], None]


def run_jobs(
    folders: Sequence[Path],
    machine: "Machine | None",
    *,
    beside: Path | None = None,
    apart: bool = False,
    announce: Announce = lambda word, folder: None,
    logs: bool = False,
    present: bool = False,
) -> "tuple[Machine | None, bool]":
    """Measure jobs of one case in turns, write their records, then run the profilers.

    `beside` is the folder of another job that has a record, and is measured once more. With `logs`, what each job
    prints goes into its folder. With `present`, backends are measured as they are now, whatever their source was when
    the job was made.

    Returns:
        The machine for the next jobs, None if there is none, and whether this process can measure others.
    """
    from attn_exp.backends.package import Unavailable
    from attn_exp.worker.attempt import is_poisoned
    from attn_exp.worker.loaded import with_present_source
    from attn_exp.worker.machine.device import Machine
    from attn_exp.worker.measure import Poisoned, Turns, measure_case
    from attn_exp.worker.profile_pass import profile_job

    began = time.perf_counter()
    places = [*folders, *([beside] if beside is not None else [])]
    requests = [read_requests(folder)[0][0] for folder in places]
    if present:
        requests = [with_present_source(request) for request in requests]
    first = requests[0]
    if machine is None or machine.device != first.device:
        if first.gpu_uuid is not None:
            # Before CUDA is initialised.
            os.environ["CUDA_VISIBLE_DEVICES"] = first.gpu_uuid
        try:
            machine = Machine.open(first.device)
        except Unavailable as error:
            for request, target in zip(requests, folders, strict=False):
                write_record(Record(request=request, status="unavailable", reason=str(error)), target)
            return None, True
    opened_s = time.perf_counter() - began
    at: Path | None = None
    failed = False

    def work_at(position: int | None) -> None:
        nonlocal at
        at = None if position is None else places[position]
        if at is None or at not in folders:
            return
        if logs:
            _log_into(at)
        # Whoever hangs or dies from now on, while it is loaded for instance, is this job.
        announce("check", at)

    def keep(position: int, record: Record) -> None:
        nonlocal failed
        target = folders[position]
        record.stages_s["open"] = round(opened_s, 6)
        record.stages_s["total"] = round(time.perf_counter() - began, 6)
        write_record(record, target)
        failed = failed or record.status == "error"
        if record.status != "ok" or not record.request.profilers:
            announce("done", target)

    def profile(position: int, record: Record, prepared: "PreparedBackend") -> None:
        nonlocal failed
        assert machine is not None
        target = folders[position]
        record = profile_job(record, prepared, machine, target, lambda word: announce(word, target))
        failed = failed or any(profile_record.status == "failed" for profile_record in record.profiles.values())
        announce("done", target)

    machine.announce = lambda stage: announce(stage, at if at in folders else None)
    turns = Turns(work_at, keep, profile, beside=beside is not None, apart=apart)
    try:
        measure_case(requests, machine, turns=turns)
    except Poisoned:
        return None, False
    machine.settings.restore()
    return machine, not (failed and is_poisoned(first.device))


def serve(reply_fd: int) -> None:
    """Measure the folders that arrive on standard input, each as a line of JSON, until it ends."""
    replies = os.fdopen(reply_fd, "w", buffering=1, encoding="utf-8")
    # A backend that reads standard input finds its end, and not the next job.
    jobs, nothing = os.fdopen(os.dup(0), encoding="utf-8"), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Imports make objects that stay: looking through them again and again for garbage takes a tenth of the time.
    gc.disable()
    import attn_exp.worker.measure  # noqa: F401  (the seconds of importing torch, before the first job is known)
    from attn_exp.worker.loaded import is_outdated

    # Imported modules stay, so later collections need not scan them; a collection then takes a millisecond.
    gc.freeze()
    gc.enable()
    machine: Machine | None = None
    replies.write("ready\n")
    for line in jobs:
        # As JSON, since a folder's name may have line breaks and bytes that are not UTF-8.
        run = line.rstrip("\n")
        message = json.loads(run)
        folders = [Path(folder) for folder in message["folders"]]
        replies.write(f"begin {run}\n")
        be_as_private_as(folders[0])
        for folder in folders:
            (folder / LOG_NAME).unlink(missing_ok=True)
        _log_into(folders[0])
        requests = [request for folder in folders for request, _ in read_requests(folder)]
        if is_outdated(requests):
            replies.write(f"outdated {run}\n")
            return
        if requests[0].device == "cpu":
            limit_memory()
        machine, fit = run_jobs(
            folders,
            machine,
            beside=Path(message["beside"]) if message["beside"] else None,
            apart=message["apart"],
            announce=partial(_announce, replies, run),
            logs=True,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        replies.write(f"{'end' if fit else 'poisoned'} {run}\n")
        if not fit:
            return


def _announce(replies: TextIO, run: str, word: str, folder: Path | None) -> None:
    replies.write(f"{word} {run if folder is None else json.dumps(str(folder))}\n")


def _log_into(folder: Path) -> None:
    """Redirect everything that this process prints, native code included, into the job's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(folder / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
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
            targets = [target for _, target in read_requests(folder)]
            run_jobs(targets, None, present=True)
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
    options = parser.parse_args(arguments)
    if options.serve != (options.folder is None) or (options.serve and options.once):
        parser.error("give a job's folder, or --serve")
    faulthandler.enable()
    if options.parent is not None:
        # Ctrl-C reaches the whole foreground process group; the parent decides how to react.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(options.parent)
        prefer_to_be_killed()
    if options.until is not None:
        end_with(options.until)
    if options.serve:
        serve(options.reply_fd)
        return 0
    try:
        return measure_again(options.folder, once=options.once)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    # Skip the interpreter's teardown: with a poisoned context or CUDA libraries loaded it may take seconds.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
