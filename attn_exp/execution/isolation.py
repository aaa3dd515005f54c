"""Isolation of jobs: they run in worker processes, or in this one."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError
from attn_exp.execution.worker import Outcome, Worker
from attn_exp.execution.worker_process import check_patterns

# Measures jobs in turns, beside another one or None, on the device that an earlier call returned (None at first), and
# returns that device.
RunFolder = Callable[[Sequence[Path], Path | None, Any], Any]


class InProcess:
    """No isolation: jobs run here, by the worker's own function, which imports torch into this process."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._pending: deque[tuple[tuple[Path, ...], Path | None]] = deque()
        self._done: deque[Path] = deque()
        self._run_folder = run_folder
        self._device: Any = None

    def submit(self, *folders: Path, beside: Path | None = None) -> None:
        """Queue the folders of jobs that are measured in turns; see `Worker.submit`."""
        self._pending.append((folders, beside))

    def wait(self, stage: Callable[[str, Path | None], None] = lambda stage, folder: None) -> Outcome:
        """Run the oldest jobs, which say no stages."""
        if not self._done:
            folders, beside = self._pending.popleft()
            self._device = self._run_folder(folders, beside, self._device)
            self._done.extend(folders)
        return Outcome(self._done.popleft())

    def close(self) -> None:
        """Drop queued jobs."""
        self._pending.clear()


def make_isolation(config: Mapping[str, Any], run_folder: RunFolder | None = None) -> Worker | InProcess:
    """Return the isolation that a configuration asks for; without `run_folder` it cannot be this process.

    Raises UserError if there is no such isolation, or a time limit or a name of a variable is invalid.
    """
    timeout_s = _limit("isolation.timeout_s", config.get("timeout_s"))
    profiler_timeout_s = _limit("profiler_timeout_s", config.get("profiler_timeout_s"))
    name = config.get("name")
    if name == "none":
        if run_folder is None:
            raise UserError("isolation=none is not possible here: leave it out, or choose isolation=fresh")
        return InProcess(run_folder)
    if name not in ("warm", "fresh"):
        raise UserError(f"isolation {name!r} is none of warm, fresh, none")
    return Worker(
        reuse=name == "warm",
        timeout_s=timeout_s,
        profiler_timeout_s=profiler_timeout_s,
        variables=check_patterns(config.get("variables")),
    )


def _limit(key: str, seconds: float | None) -> float | None:
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (number and seconds > 0):
        raise UserError(f"{key}={seconds} is not a positive number of seconds")
    return seconds
