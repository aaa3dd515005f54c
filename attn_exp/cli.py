"""The command line `attn-exp COMMAND ...`, equally `python -m attn_exp COMMAND ...`; without a command it runs."""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

COMMANDS = ("run", "duel", "compare", "explain", "doctor", "backends", "log", "ui", "worker")


def main() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = dispatch(sys.argv[1:])
    except BrokenPipeError:
        # The reader of the output (`head`) has left. Not by SIGPIPE: a worker that dies breaks a pipe too.
        code = 0
    except KeyboardInterrupt:
        code = 130
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Threads that still import or log must not keep a finished or interrupted program alive.
    os._exit(code)


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, `run` if it names none; return the exit code."""
    name, rest = ("run", arguments) if not arguments or arguments[0] not in COMMANDS else (arguments[0], arguments[1:])
    command = importlib.import_module(f"attn_exp.commands.{name}")
    code: int = command.main(list(rest))
    return code


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
