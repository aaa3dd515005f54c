"""`attn-exp run`, or no command at all: the Hydra application that measures. `--help` says what can be set."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.config.overrides import no_gpu, overridden
from attn_exp.core.errors import UserError
from attn_exp.core.live_line import LiveLine
from attn_exp.core.redaction import redacted
from attn_exp.core.versions import __version__
from attn_exp.execution.worker import Worker

if TYPE_CHECKING:
    from attn_exp.core.record.record import Record
    from attn_exp.execution.session import Session
    from attn_exp.sweep.task_function import SessionTask

# The keys that decide how or where a worker is started: tasks of a launcher have workers of their own.
_WORKER_KEYS = ("isolation", "isolation.variables", "hydra/launcher")
# With one of these nothing is measured, so no worker is started ahead.
_NO_JOBS = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments ask for; return 0, 2 after a mistake of the user's, or 130 after Ctrl-C.

    It is 1 if `stop_on` ended the sweep, if no job has a number and one was not unsupported, and if the one case that
    was asked for has no result that is final.
    """
    # argparse wants flags before or after the overrides, not among them; people type them anywhere.
    arguments = sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))
    if "--version" in arguments:
        print(f"attn_exp {__version__}")
        return 0
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    with _session(arguments) as session:
        code = _measure(arguments, session)
        if code:
            session.status = "FAILED"
    # A sweep has its other jobs; a single case that is lost leaves nothing.
    single = session.progress.total == 1 and not {"-m", "--multirun"} & set(arguments)
    unwritten = session.progress.unwritten is not None
    return code or int(session.no_number or session.not_stored or unwritten or (single and session.lost > 0))


def run_sweep(arguments: list[str], each: "Callable[[Record, Path], None]") -> "Path | None":
    """Run a sweep for a Python program, and return its folder; None if there is none, as in a dry run.

    `each` is called with the record of each job that has ended, and the job's folder. Raises UserError, whose message
    is the last line on the command line.
    """
    from attn_exp.config.compose import new_sweep_name
    from attn_exp.config.hydra_main import hydra_main
    from attn_exp.config.overrides import hydra_aside
    from attn_exp.sweep.task_function import SessionTask

    with hydra_aside(), _session(arguments, each) as session:
        try:
            hydra_main(arguments, SessionTask(session), new_sweep_name(arguments=arguments))
        except SystemExit as stopped:
            session.status = "FAILED"
            if isinstance(stopped.code, UserError):
                raise stopped.code from None
    return session.context.folder if session.context is not None else None


def run_records(records: "Sequence[Record]", arguments: list[str], command: list[str]) -> int:
    """Measure the jobs of records again; return the exit code.

    `arguments` are this run's overrides, with `sweep=`, and `command` is what was typed. Lines about jobs go to
    standard error.
    """
    from attn_exp.sweep.task_function import RecordsTask

    with _session(command, lambda *_: None) as session:
        code = _measure(arguments, session, RecordsTask(session, records))
        session.status = "FAILED" if code else session.status
    return code


@contextlib.contextmanager
def _session(arguments: list[str], each: "Callable[[Record, Path], None] | None" = None) -> "Iterator[Session]":
    """Yield the session of a run, which ends with the block. With `each`, results are not printed."""
    worker = Worker(reuse=True, timeout_s=None)
    if not overridden(arguments, *_NO_JOBS, "dry_run", *_WORKER_KEYS):
        start_ahead(worker)
    if not overridden(arguments, *_NO_JOBS, "device", "quiet") and no_gpu(arguments):
        print("No GPU found: measuring the CPU", file=sys.stderr, flush=True)
    line = LiveLine(quiet="quiet=true" in arguments)
    if not overridden(arguments, *_NO_JOBS):
        line.show("composing the jobs")
    from attn_exp.commands.worker import run_here
    from attn_exp.execution.session import Session

    session = Session(arguments, worker, run_here, line, each)
    try:
        yield session
    except KeyboardInterrupt:
        session.close("KILLED")
        raise
    except BaseException:
        session.close("FAILED")
        raise
    session.close(session.status)


def start_ahead(worker: Worker) -> None:
    """Start the worker before anything else is imported here: it has seconds of imports to do."""
    worker.start()


def _measure(arguments: list[str], session: "Session", task: "SessionTask | None" = None) -> int:
    """Run what the arguments ask for in this session; 0, or 2 with one sentence on standard error."""
    from attn_exp.config.compose import new_sweep_name
    from attn_exp.config.hydra_main import hydra_main
    from attn_exp.sweep.task_function import SessionTask

    try:
        hydra_main(arguments, task or SessionTask(session), new_sweep_name(arguments=arguments))
    except UserError as error:
        session.progress.line.close()
        print(f"attn-exp: {redacted(str(error))}", file=sys.stderr)
        return 2
    except SystemExit as stopped:
        session.progress.line.close()
        if isinstance(stopped.code, UserError):
            print(f"attn-exp: {redacted(str(stopped.code))}", file=sys.stderr)
        return stopped.code if isinstance(stopped.code, int) else 2
    return 0
