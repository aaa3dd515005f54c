"""The command under drill: one sweep, started again and again until it is done, with a hand that interferes."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from cli import TRACKED

from attn_exp.core.host.process import descendants
from attn_exp.core.record.file import FILE_NAME
from drill.plan import Plan

TESTS = Path(__file__).resolve().parents[1]
# What no file of a sweep, and no line of a command, may have.
SECRETS = {"DRILL_API_TOKEN": secrets.token_urlsafe(24), "DRILL_DB_PASS": secrets.token_urlsafe(12)}
# A word of a reason, and how a terminal shows it that knows only ASCII.
ACCENT, ACCENT_IN_ASCII = "caf\u00e9", "caf?"
# What a process has of its user besides its number, and what a user without a home and an entry has.
_OF_USER = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
NOBODY = "ATTN_EXP_DRILL_NOBODY"
# Runs what follows as a container does: with numbers of processes of its own.
_CONTAINED = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
_LIMIT_S = 600.0
_APART_S = 0.05
_LOOK_S = 0.03
# A share of the jobs that have a record, or what has to hold.
When = float | Callable[[], bool]
Step = tuple[When, Callable[["Running"], None]]


def can_contain() -> bool:
    """Whether this system lets us make a namespace of processes."""
    if shutil.which(_CONTAINED[0]) is None:
        return False
    return subprocess.run([*_CONTAINED, "true"], capture_output=True, check=False).returncode == 0


@dataclass
class Running:
    """A command under way."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def family(self) -> list[int]:
        """The process and those below it."""
        return [self.process.pid, *(child for child, _ in descendants(self.process.pid))]

    def signal(self, *numbers: signal.Signals) -> None:
        """Send signals to the parent alone, a twentieth of a second apart: what a hand on Ctrl-C does."""
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(_APART_S)


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code, output, and how many jobs had a record then."""

    code: int
    said: str
    records: int


class Command:
    """`python -m attn_exp -m ... sweep=NAME`, always the same."""

    def __init__(
        self,
        world: Path,
        sweep: str,
        jobs: int,
        plan: Path,
        folder: Path,
        tracker: list[str],
        timeout_s: int = 6,
        target: str = "drill.backend.Drilled",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._tracker, self._variables = tracker, dict(variables or {})
        self.sweep, self.jobs, self.plan, self.folder, self._world = sweep, jobs, plan, folder, world
        self.temporary, self.clock = world / f"tmp-{sweep}", world / f"clock-back-{sweep}"
        self.temporary.mkdir()
        small = [argument for argument in TRACKED if not argument.startswith(("batch=", "tracker.patience_s="))]
        self._arguments = [
            *("-m", *small, f"batch=range(1,{jobs + 1})"),
            *("backend=eager", f"backend._target_={target}", "backend.name=drilled"),
            *(
                f"+backend.plan={plan}",
                f"isolation.timeout_s={timeout_s}",
                f"isolation.variables=[{','.join(SECRETS)}]",
                f"sweep={sweep}",
                f"folder={folder}",
                *tracker,
            ),
        ]

    def of_own_backend(self, sweep: str, jobs: int, target: str) -> "Command":
        """Return the command of another sweep in which nothing goes wrong, by a backend in the current folder."""
        plan = Plan(sweep, jobs, {})
        plan.write(path := self._world / f"plan-{sweep}.json")
        store = [f"tracker.uri=sqlite:///{self._world}/{sweep}.db"]
        return Command(self._world, sweep, jobs, path, self.folder.with_name(sweep), store, target=target)

    def records(self) -> list[Path]:
        """The records that lie there now, whole or not."""
        return sorted(self.folder.glob(f"*/{FILE_NAME}"))

    def start(
        self, more: Sequence[str] = (), *, contained: bool = False, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        """Start it, with more arguments that make no other jobs of it; in a namespace of processes, if asked."""
        return subprocess.Popen(
            [*(_CONTAINED if contained else ()), sys.executable, "-m", "attn_exp", *self._arguments, *more],
            cwd=self._world,
            env=self._environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def read(self, reader: str) -> Ended:
        """Let a command that reads records look at the sweep's folder."""
        words = [reader, str(self.folder), *(self._tracker if reader == "log" else ())]
        done = subprocess.run(
            [sys.executable, "-m", "attn_exp", *words],
            cwd=self._world,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        return Ended(done.returncode, done.stdout, len(self.records()))

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(TESTS / "drill" / "clock"), str(TESTS), str(TESTS.parent)])
        given = {name: value for name, value in os.environ.items() if name not in _OF_USER or not self._variables}
        own = {"PYTHONPATH": path, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        return given | own | SECRETS | {"ATTN_EXP_DRILL_CLOCK_BACK": str(self.clock)} | self._variables

    def run(
        self,
        *steps: Step,
        more: Sequence[str] = (),
        contained: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Ended:
        """Run it to its end, whichever, and take each step as soon as its time has come."""
        process = self.start(more, contained=contained, variables=variables)
        running = Running(process)
        reader = threading.Thread(target=self._read, args=(running,), daemon=True)
        reader.start()
        waiting, deadline = list(steps), time.monotonic() + _LIMIT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"{self.sweep} hangs; its last lines: {running.said[-5:]}")
            if waiting and self._has_come(waiting[0][0]):
                waiting.pop(0)[1](running)
            time.sleep(_LOOK_S)
        reader.join()
        return Ended(process.returncode, "".join(running.said), len(self.records()))

    def _has_come(self, when: When) -> bool:
        return when() if callable(when) else len(self.records()) >= when * self.jobs

    def _read(self, running: Running) -> None:
        assert running.process.stdout is not None
        running.said.extend(running.process.stdout)
