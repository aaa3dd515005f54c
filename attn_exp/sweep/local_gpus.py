"""local_gpus: a task for each GPU of this host, in a thread of this process.

Threads are enough: a task only waits for its worker, which is a process. Nothing between the two can die, and nothing
has to be pickled. hydra-joblib-launcher requires processes instead, and one that dies ends all others.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attn_exp.core.errors import UserError, first_line
from attn_exp.core.nvml import GpuInfo
from attn_exp.sweep.task import run_task


class LocalGpus:
    """All GPUs that CUDA_VISIBLE_DEVICES names."""

    name = "local_gpus"
    pinned = True

    def __init__(self, device: str, gpus: list[GpuInfo]) -> None:
        """Raises UserError if there is no GPU, or if `device` names one of them."""
        if device not in ("auto", "cuda"):
            raise UserError(
                f"hydra/launcher=local_gpus takes all GPUs: leave device={device} out, or leave hydra/launcher out"
            )
        if not gpus:
            raise UserError("hydra/launcher=local_gpus needs NVIDIA GPUs and there is none here: leave it out")
        self.gpus = gpus
        self.tasks = len(gpus)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, launch: Path, tasks: int, say: Callable[[str], None], over: Callable[[], bool]) -> dict[int, str]:
        """As `Launcher.run`; all tasks start at once."""
        # Not `with`: leaving it after Ctrl-C would wait for tasks that were not cancelled.
        self._pool = ThreadPoolExecutor(tasks)
        ended = [self._pool.submit(_end_of_task, launch, task) for task in range(tasks)]
        return {task: why for task, one in enumerate(ended) if (why := one.result()) is not None}

    def close(self) -> None:
        """Wait for the threads, which end with what they wait for."""
        if self._pool is not None:
            self._pool.shutdown()


def _end_of_task(launch: Path, task: int) -> str | None:
    # If one task fails, for instance at a full disk, the others go on.
    try:
        run_task(launch, task)
    except Exception as error:
        return first_line(error)
    return None
