"""hydra/launcher=slurm: tasks as an array of Slurm jobs, by submitit.

This uses submitit rather than hydra-submitit-launcher, which waits for results in order, raises at the first task that
dies while others still run, and cancels nothing after Ctrl-C.
"""

import contextlib
import io
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError, first_line, nearest
from attn_exp.sweep.launcher import ELSEWHERE, END_S, check_tasks, load_engine, waiting_until
from attn_exp.sweep.task import run_in_process

CLUSTERS = ("slurm", "local")
_POLL_S = 0.5
# sacct is slow and shared by all users; a task that succeeds writes its result itself.
_ASK_S = 30.0
# For a task without a result submitit quotes its log files, each below one of these captions.
_CAPTION = re.compile(r"Job (\d|\(task)|has not produced|Error stream|No (error|output)|You can check|- /")
_OURS = ("name", "tasks", "cluster")
# Options that submitit has for every cluster; others are Slurm's.
_SHARED = ("timeout_min", "cpus_per_task", "gpus_per_node", "mem_gb")


class Slurm:
    """An array of tasks, each with the configured resources."""

    name = "slurm"
    pinned = False

    def __init__(self, options: dict[str, Any], device: str) -> None:
        """Raises UserError if there is no Slurm or no submitit."""
        self.tasks = check_tasks(self.name, options, device)
        cluster = options["cluster"]
        if cluster not in CLUSTERS:
            raise UserError(
                f"hydra.launcher.cluster={cluster} is no cluster: {nearest(str(cluster), CLUSTERS)}"
                f"choose {' or '.join(CLUSTERS)}"
            )
        load_engine("submitit", self.name)
        if cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
            raise UserError("hydra/launcher=slurm needs sbatch and srun: start from a host that submits to Slurm")
        self._cluster = cluster
        self._options = {key: value for key, value in options.items() if key not in _OURS and value not in (None, {})}
        if device == "cpu":
            self._options.pop("gpus_per_node", None)
        more = dict(self._options.get("additional_parameters") or {})
        named = self._options.get("gpus_per_node") or self._options.get("gpus_per_task")
        self.gpus = [ELSEWHERE] if named or "gpu" in f"{self._options.get('gres')} {more}" else []
        self._left: dict[int, Any] = {}

    def run(self, launch: Path, tasks: int, say: Callable[[str], None], over: Callable[[], bool]) -> dict[int, str]:
        """As `Launcher.run`."""
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        logging.getLogger("submitit").setLevel(logging.ERROR)
        try:
            executor = AutoExecutor(folder=launch / "submitit", cluster=self._cluster)
            named = {key if key in _SHARED else f"slurm_{key}": value for key, value in self._options.items()}
            executor.update_parameters(name="attn_exp", **named)
            # submitit prints what sbatch says, and raises it too.
            with contextlib.redirect_stderr(io.StringIO()):
                jobs = executor.map_array(run_in_process, [str(launch)] * tasks, list(range(tasks)))
        except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError, OSError) as error:
            # The reason that sbatch gives; a line without a reason follows it.
            reasons = [line.strip() for line in str(error).splitlines() if "error:" in line]
            raise UserError(f"Slurm does not take the tasks: {[*reasons, _last_line(error)][0]}") from error
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"hydra.launcher has what submitit does not take: {first_line(error)}") from error
        say(f"{tasks} tasks on {self._cluster}: {', '.join(job.job_id for job in jobs)}")
        self._left = dict(enumerate(jobs))
        ended, checked, waiting = {}, time.monotonic(), waiting_until(END_S, over)
        while self._left and waiting():
            force = time.monotonic() - checked > _ASK_S
            checked = time.monotonic() if force else checked
            for task, job in list(self._left.items()):
                if not job.done(force_check=force):
                    continue
                why = job.exception()
                if why is not None:
                    ended[task] = f"{self._cluster} job {job.job_id}: {_last_line(why)}"
                del self._left[task]
            if self._left:
                time.sleep(_POLL_S)
        return ended

    def close(self) -> None:
        """Cancel tasks that are queued or running."""
        until = time.monotonic() + (END_S if self._cluster == "local" else 0.0)
        for job in self._left.values():
            while not job.done() and time.monotonic() < until:
                time.sleep(_POLL_S / 10)
            if self._cluster != "local" or not job.done():
                with contextlib.suppress(OSError):
                    job.cancel(check=False)


def _last_line(error: Exception) -> str:
    """Return the last line of a task's log that is not submitit's own."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    lines = [line for line in lines if line.strip("-") and not line.startswith("submitit ")]
    printed = [line for line in lines if not _CAPTION.match(line)]
    return printed[-1] if printed else "it was killed, or ended without a word"
