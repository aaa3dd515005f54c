"""The command line `attn-exp COMMAND ...`, equally `python -m attn_exp COMMAND ...`: lists and dispatches the commands.

Without a command the arguments are those of `run`. A command's module is imported only when it is asked for.
"""

import contextlib
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from attn_exp.core.conf import conf_folder
from attn_exp.core.host.home import provide_home
from attn_exp.core.versions import __version__

COMMANDS = {
    "run": "measure cases on backends, one or every combination; also what runs without a command",
    "duel": "measure backends side by side and say which is faster, and how surely",
    "compare": "say from records which backend is faster where, or what changed since an earlier sweep",
    "pick": "write a table of the fastest backend at each shape, which a model can dispatch by",
    "hunt": "search for a case that a backend computes wrongly",
    "bisect": "find the version of a package that made something slower",
    "reproduce": "repeat published figures or another host's sweep, and say which hold",
    "explain": "show what ran in a job, what bounds it, and how it differs from the fastest",
    "doctor": "check that timings on this machine can be trusted",
    "backends": "list the backends, and which can compute a case",
    "log": "store earlier records in MLflow",
    "ui": "start the MLflow UI on this project's database",
    "worker": "measure one job's folder again, for debugging and external profilers",
}
_OVERVIEW = """\
attn_exp: which attention implementation is fastest here, by how much, and can it be trusted?

  attn-exp COMMAND ...          the same as: python -m attn_exp COMMAND ...

commands:
{commands}

Sweeps are positional arguments; options are written key=value:
  attn-exp compare new against=old fail_if_slower=3%
Without a command the arguments are those of run, groups and keys of Hydra:
  python -m attn_exp                                        one case on one backend
  python -m attn_exp -m backend=flash,cudnn batch=1,8,16    every combination, one job each
  python -m attn_exp -m backend=all seq_len=4096            all that run here: what is fastest for my shape
  python -m attn_exp -m +experiment=sdpa_sweep              a stored sweep
  python -m attn_exp -m backend=flash,math dry_run=true     list the jobs, start nothing
  python -m attn_exp -m ... hydra/launcher=local_gpus       on all GPUs here; also slurm, ray

help:
  attn-exp COMMAND --help       explains a command; attn-exp run --help lists groups and keys
  attn-exp --hydra-help         Hydra's own flags
  attn-exp --version            the version
  eval "$(attn-exp -sc install=bash)"    the TAB key completes groups, choices and keys
"""
_HELP = {"-h", "--help"}
# How many more objects there are before some are looked through for garbage.
_ALLOCATIONS = 50_000


def main() -> None:
    """Run the command line and exit with its code."""
    interrupts: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    # A closed terminal ends a sweep as SIGTERM does; below nohup it goes on. Schedulers send the others before the time
    # of a job is over (Slurm's --signal=USR1@60).
    for other in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU):
        if signal.getsignal(other) is signal.SIG_DFL:
            signal.signal(other, interrupt)
    # A shell starts what is in the background of a script deaf to it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    provide_home()
    for number in range(3):
        # A file that is opened later would get the number of a closed one, and what is printed.
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        # A write to a closed output has to fail.
        os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Records and names have letters that an ASCII terminal has not; a command must not end over one.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # Objects of imports stay: looking through them again and again for garbage takes a tenth of a short command's time.
    gc.set_threshold(_ALLOCATIONS)
    if sys.argv[1:2] == ["compare"]:
        # Thousands of records are millions of objects without a cycle: looking for some takes a sixth of the time.
        gc.disable()
    try:
        code = dispatch(sys.argv[1:])
        code = _written(sys.stdout.flush) or code
    except BrokenPipeError:
        # The reader of the output (`head`) has left. Not by SIGPIPE: a worker that dies breaks a pipe too.
        code = 0
    except OSError:
        # Unless it is standard output that cannot be written.
        if not (code := _written(lambda: os.write(1, b"\n"))):
            raise
    except KeyboardInterrupt:
        code = 130
    except Exception:
        # A library that an interrupt met halfway may raise anything, such as an AttributeError of what it had not set.
        if not interrupts:
            raise
        code = 130
    # A command that has not imported it made no folder, and would wait for it.
    if "attn_exp.core.files" in sys.modules:
        from attn_exp.core.files import remove_folders_until_exit

        remove_folders_until_exit()
    # Threads that still import or log must not keep a finished or interrupted program alive.
    os._exit(code)


def _written(write: Callable[[], object]) -> int:
    """Write to standard output; return 1, after a sentence, if it cannot take that."""
    try:
        write()
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(f"attn-exp: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, `run` if it names none; return the exit code."""
    words = list(arguments)
    if words and set(words) <= _HELP:
        width = max(map(len, COMMANDS))
        print(_OVERVIEW.format(commands="\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())))
        return 0
    if words == ["--version"]:
        print(f"attn_exp {__version__}")
        return 0
    if words and words[0] in COMMANDS:
        name, words = words[0], words[1:]
        command = importlib.import_module(f"attn_exp.commands.{name}")
        code: int = command.main(words)
        return code
    # No command has so many letters, nor has any folder.
    if words and words[0].isidentifier() and len(words[0]) < 100 and not (conf_folder() / words[0]).is_dir():
        from attn_exp.core.errors import nearest

        if near := nearest(words[0], COMMANDS, cutoff=0.7):
            print(f"attn-exp: there is no command '{words[0]}': {near}attn-exp --help lists them", file=sys.stderr)
            return 2
    from attn_exp.commands.run import main as run

    return run(words)
