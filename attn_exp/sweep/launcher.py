"""What a launcher is: where the tasks of a sweep run, and how their end is noticed."""

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from attn_exp.core.errors import UserError, first_line
from attn_exp.core.nvml import GpuInfo

# Stands for the GPU that a task will find on whatever host it runs.
ELSEWHERE = GpuInfo(0, "that of a task", "")
# Tasks end by themselves once nothing is left to do; cancelled, they leave a traceback.
END_S = 2.0


class Launcher(Protocol):
    """Runs tasks; each of them takes jobs until there is none left."""

    name: str
    # As many as may be of use; there may be fewer groups of jobs.
    tasks: int
    # The GPUs that `device=auto` and `device=cuda` mean.
    gpus: list[GpuInfo]
    # Whether task number N is for the N-th of them alone.
    pinned: bool

    def run(self, launch: Path, tasks: int, say: Callable[[str], None], over: Callable[[], bool]) -> dict[int, str]:
        """Run tasks 0 to `tasks` - 1 of the launch in this folder until all have ended, however they did.

        As soon as `over` says that nothing is left to do, those that an engine has not started are not waited for. An
        interrupt passes through; tasks that still run end by themselves when the board tells them to.

        Returns:
            Of each task that did not end as it should, why.

        Raises:
            UserError: no task can be started as configured.
        """

    def close(self) -> None:
        """Take back what still runs or is queued, after tasks were told to end; leave nothing behind."""


def waiting_until(seconds: float, over: Callable[[], bool]) -> Callable[[], bool]:
    """Whether to go on waiting: until so long after `over` was first true."""
    since: list[float] = []

    def going() -> bool:
        if not since and over():
            since.append(time.monotonic())
        return not since or time.monotonic() - since[0] < seconds

    return going


def require_engine(package: str, extra: str) -> None:
    """Raise UserError if a launcher's engine is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"hydra/launcher={extra} needs {package}: pip install 'attn_exp[{extra}]'")


def load_engine(package: str, extra: str) -> Any:
    """A launcher's engine. Raises UserError if it is installed and cannot be imported."""
    try:
        return importlib.import_module(package)
    except Exception as error:  # a package that does not fit what is installed fails in ways of its own
        raise UserError(
            f"{package} cannot be imported ({first_line(error)}): pip install --upgrade 'attn_exp[{extra}]'"
        ) from error


def check_tasks(name: str, options: dict[str, Any], device: str) -> int:
    """The number of tasks of a launcher that starts them on other hosts.

    Raises:
        UserError: not a number of tasks, or a device by the numbers of this host.
    """
    tasks = options["tasks"]
    if not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 1:
        raise UserError(f"hydra.launcher.tasks={tasks} is not a whole number from 1")
    if device.startswith("cuda:"):
        raise UserError(f"device={device} is a GPU of this host: with hydra/launcher={name} leave device out")
    return tasks
