"""Launchers run the tasks of a sweep and notice when they end (`hydra/launcher`)."""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from attn_exp.core.errors import UserError, first_line
from attn_exp.core.host.nvml import GpuInfo

# Stands for the GPU of the host on which a task will run.
ELSEWHERE = GpuInfo(0, "that of a task", "")
# Tasks end by themselves once no job is left; tasks that are cancelled leave a traceback.
END_S = 2.0


class Launcher(Protocol):
    """Runs tasks, each of which takes jobs until none is left.

    Attributes:
        tasks: the number of tasks that may be useful; there may be fewer groups of jobs.
        gpus: the GPUs that `device=auto` and `device=cuda` mean.
        pinned: whether task N may use only the N-th GPU.
    """

    name: str
    tasks: int
    gpus: list[GpuInfo]
    pinned: bool

    def run(self, launch: Path, tasks: int, say: Callable[[str], None], over: Callable[[], bool]) -> dict[int, str]:
        """Run tasks 0 to `tasks` - 1 until all have ended; return why each failed that did.

        `launch` is the folder of the launch, with its plan and its board. Once `over` returns true, tasks that the
        engine has not started are not waited for. An interrupt passes through; tasks that still run end by themselves
        when the board tells them to. Raises UserError if no task can be started as configured.
        """

    def close(self) -> None:
        """Cancel the tasks that still run or are queued; they were asked to end before."""


def waiting_until(seconds: float, over: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that says whether to wait on: until `seconds` after `over` was first true."""
    since: float | None = None

    def waiting() -> bool:
        nonlocal since
        if since is None and over():
            since = time.monotonic()
        return since is None or time.monotonic() - since < seconds

    return waiting


def load_engine(package: str, extra: str) -> Any:
    """Import a launcher's engine. Raises UserError if that cannot be done."""
    try:
        return importlib.import_module(package)
    except Exception as error:  # an incompatible package may raise anything
        raise UserError(
            f"hydra/launcher={extra} needs {package} ({first_line(error)}): pip install --upgrade 'attn_exp[{extra}]'"
        ) from error


def check_tasks(name: str, options: dict[str, Any], device: str) -> int:
    """Return the number of tasks of a launcher that starts them on other hosts. Raises UserError for a wrong one."""
    tasks = options["tasks"]
    if not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 1:
        raise UserError(f"hydra.launcher.tasks={tasks} is not a whole number from 1")
    if device.startswith("cuda:"):
        raise UserError(f"device={device} is a GPU of this host: with hydra/launcher={name} leave device out")
    return tasks
