"""`attn-exp run`, or no command at all: the Hydra application that measures. `--help` says what can be set."""

import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.core.redaction import redacted
from attn_exp.core.version import __version__
from attn_exp.run.worker_process import Worker

# What decides how a worker is started, or where: tasks of a launcher have workers of their own.
_WORKER_KEYS = ("isolation=", "isolation.variables=", "hydra/launcher=")
# With one of these nothing is measured, so no worker is started ahead.
_NO_JOBS = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments ask for; return 0, 2 after a mistake of the user's, or 130 after Ctrl-C."""
    # argparse wants flags before or after the overrides, not among them; people type them anywhere.
    arguments = sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))
    sys.argv[1:] = arguments
    if "--version" in arguments:
        print(f"attn_exp {__version__}")
        return 0
    # With a random part: two sweeps that start together get two folders.
    os.environ["ATTN_EXP_SWEEP"] = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(2)}"
    # Without it Hydra prints its own errors and exits 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    worker = Worker(reuse=True, timeout_s=None)
    measures = not any(argument.split("=")[0] in (*_NO_JOBS, "dry_run") for argument in arguments)
    if measures and not any(argument.lstrip("+~").startswith(_WORKER_KEYS) for argument in arguments):
        start_ahead(worker)
    from attn_exp.run.session import session
    from attn_exp.tracking.base import EndStatus

    session().adopt(worker)
    status: EndStatus = "FAILED"
    try:
        code = _hydra()
        status = "FINISHED" if code == 0 else "FAILED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        session().close(status)
    return code


def start_ahead(worker: Worker) -> None:
    """Start the worker before anything else is imported here: it has seconds of imports to do."""
    worker.start()


def _hydra() -> int:
    """Hydra's part; 0, or 2 with one sentence on standard error."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from attn_exp.config.check import sentence
    from attn_exp.sweep.sweeper import register
    from attn_exp.sweep.task_function import task

    register()
    try:
        _check_flags()
        hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(task)()
    except (UserError, HydraException, OmegaConfBaseException, ValueError) as error:
        # Of Hydra's ValueErrors these are about what was typed; any other is a fault of ours.
        if type(error) is ValueError and not str(error).startswith(("Config group override", "Only one of --run")):
            raise
        print(f"attn_exp: {redacted(sentence(error))}", file=sys.stderr)
        return 2
    except SystemExit as stopped:
        if isinstance(stopped.code, UserError):
            print(f"attn_exp: {redacted(str(stopped.code))}", file=sys.stderr)
        return stopped.code if isinstance(stopped.code, int) else 2
    return 0


def _check_flags() -> None:
    """Raise UserError for flags that Hydra would refuse with a page of usage."""
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; flags go before the choices, and python -m attn_exp --hydra-help lists them")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    for text in parser.parse_args().overrides:
        if text.lstrip("+~").startswith("="):
            # Hydra's grammar lets it pass, and an assertion fails later.
            raise UserError(f"'{text}' is not of the form key=value, for example backend=flash or batch=1,8,16")
