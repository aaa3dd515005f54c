"""python -m attn_exp: the Hydra entry. `--help` says what can be set."""

import contextlib
import os
import secrets
import signal
import sys
import time
from types import FrameType

from attn_exp.conf import conf_folder
from attn_exp.errors import UserError

# With one of these nothing is measured, so no worker is started ahead.
_NO_JOBS = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "--shell-completion", "-sc")


def main() -> None:
    """Run the command line; exits 0, 2 after a mistake of the user's, 130 after Ctrl-C."""
    # argparse wants flags before or after the overrides, not among them; people type them anywhere.
    arguments = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    sys.argv[1:] = arguments
    # Microseconds and a random part: two sweeps that start together get two folders.
    os.environ["ATTN_EXP_SWEEP"] = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(2)}"
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        code = 130
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Threads that still import or log must not keep a finished or interrupted program alive.
    os._exit(code)


def _run(arguments: list[str]) -> int:
    from attn_exp.run import session
    from attn_exp.trackers.base import EndStatus

    measures = not any(argument in _NO_JOBS or argument == "dry_run=true" for argument in arguments)
    if measures and not any(argument.startswith("isolation=") for argument in arguments):
        session().prestart()
    status: EndStatus = "FAILED"
    try:
        code = _hydra(measures)
        status = "FINISHED" if code == 0 else "FAILED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        session().close(status)
    return code


def _hydra(measures: bool) -> int:
    """Hydra's part; 0, or 2 with one sentence on standard error."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from attn_exp.mistakes import sentence
    from attn_exp.run import task
    from attn_exp.sweeper import register

    register()
    try:
        hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(task)()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"attn_exp: {sentence(error)}", file=sys.stderr)
        return 2
    except SystemExit as stopped:
        if isinstance(stopped.code, UserError):
            print(f"attn_exp: {stopped.code}", file=sys.stderr)
        return stopped.code if isinstance(stopped.code, int) else 2
    return 0


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
