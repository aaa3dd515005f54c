"""local_gpus: a task for each GPU of this host, in a thread of this process, by joblib.

Threads and not processes, which hydra-joblib-launcher insists on: a task only waits for its worker, which is a process
of its own; between the two there is then nothing that could die, and nothing to pickle. Of joblib's processes one that
dies takes the others along.
"""

from collections.abc import Callable
from pathlib import Path

from attn_exp.core.errors import UserError, first_line
from attn_exp.core.nvml import GpuInfo
from attn_exp.sweep.task import run_task


class LocalGpus:
    """All GPUs that CUDA_VISIBLE_DEVICES lets through."""

    name = "local_gpus"
    pinned = True

    def __init__(self, device: str, gpus: list[GpuInfo]) -> None:
        """Raises UserError where there is no GPU, or where one is asked for."""
        if device not in ("auto", "cuda"):
            raise UserError(
                f"hydra/launcher=local_gpus takes all GPUs: leave device={device} out, or leave hydra/launcher out"
            )
        if not gpus:
            raise UserError("hydra/launcher=local_gpus needs NVIDIA GPUs and there is none here: leave it out")
        self.gpus = gpus
        self.tasks = len(gpus)

    def run(self, launch: Path, tasks: int, say: Callable[[str], None], over: Callable[[], bool]) -> dict[int, str]:
        """As `Launcher.run`; none of its tasks is ever queued."""
        from joblib import Parallel, delayed

        ended = Parallel(n_jobs=tasks, backend="threading")(
            delayed(_end_of_task)(launch, task) for task in range(tasks)
        )
        return {task: why for task, why in enumerate(ended) if why is not None}

    def close(self) -> None:
        """Threads end with what they wait for."""


def _end_of_task(launch: Path, task: int) -> str | None:
    # Whatever goes wrong in one task, a full disk for instance, the others go on.
    try:
        run_task(launch, task)
    except Exception as error:
        return first_line(error)
    return None
