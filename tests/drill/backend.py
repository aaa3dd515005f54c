"""The backend of the drill: right and quick, unless the plan says that this job suffers; then once, and never again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from crashers import ExhaustsMemory, Exits, Hangs, Segfaults, _Hurts

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.core.case.case import Case
from drill.command import ACCENT, SECRETS
from drill.plan import QUOTES, struck


def end_later() -> None:
    """Close the worker's standard input: it ends when it asks for the next job."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def write_bytes() -> None:
    """Write what is not UTF-8 to the pipe on which the worker answers."""
    os.write(int(sys.argv[sys.argv.index("--reply-fd") + 1]), b"\xff\xfe\x80\n")


def leave_daemon() -> None:
    """Start a process that leaves the worker's group."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def write_long_log() -> None:
    """Make the worker's log two gigabytes long; most of it is a hole."""
    os.ftruncate(2, 2 << 30)


def quote_secrets() -> None:
    """Raise an error that has the values of secret variables, which also stand in the worker's log."""
    text = " ".join(f"{name}={os.environ[name]}" for name in SECRETS)
    print(f"login with {text}", file=sys.stderr, flush=True)
    raise RuntimeError(f"{ACCENT}: cannot log in with {text} at https://drill:{os.environ[next(iter(SECRETS))]}@host/")


_FAULTS = {"segmentation fault": Segfaults, "exit in a library": Exits, "hang": Hangs, "out of memory": ExhaustsMemory}
_OTHERS = {
    "end between two jobs": end_later,
    "bytes that are no text for the parent": write_bytes,
    "a daemon of its own": leave_daemon,
    "a log of two gigabytes": write_long_log,
    QUOTES: quote_secrets,
}


class Drilled(_Hurts):
    """`plan` is the file of a `Plan`; beside it stands a file for every fault that has struck."""

    def __init__(self, name: str, plan: str) -> None:
        super().__init__(name)
        self._plan = Path(plan)
        self._batch = 0

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        self._batch = case.batch
        if sys.stdin.read():
            raise RuntimeError("standard input has something for somebody else")
        return super().prepare(case, inputs)

    def hurt(self) -> None:
        fault = json.loads(self._plan.read_bytes())["faults"].get(str(self._batch))
        mark = struck(self._plan, self._batch)
        if fault is None or mark.exists():
            return
        mark.touch()
        if fault.startswith("killed by "):
            os.kill(os.getpid(), signal.Signals[fault.removeprefix("killed by ")])
        elif fault in _OTHERS:
            _OTHERS[fault]()
        else:
            _FAULTS[fault](self.name).hurt()
