"""hydra/launcher=ray: tasks on a Ray cluster.

Ray is used directly: hydra-ray-launcher 1.2.2 raises for the whole sweep if one task dies.
"""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError, first_line
from attn_exp.sweep.launcher import ELSEWHERE, END_S, check_tasks, load_engine, waiting_until
from attn_exp.sweep.task import run_in_process

_POLL_S = 0.5


class Ray:
    """The configured number of tasks, each with its share of a cluster."""

    name = "ray"
    pinned = False

    def __init__(self, options: dict[str, Any], device: str) -> None:
        """Raises UserError if Ray is not installed."""
        self.tasks = check_tasks(self.name, options, device)
        load_engine("ray", self.name)
        self._address = options["address"]
        self._share = {"num_gpus": 0 if device == "cpu" else options["num_gpus"], "num_cpus": options["num_cpus"]}
        self.gpus = [ELSEWHERE] if self._share["num_gpus"] else []
        self._ray: Any = None

    def run(self, launch: Path, tasks: int, say: Callable[[str], None], over: Callable[[], bool]) -> dict[int, str]:
        """As `Launcher.run`."""
        ray = self._connect()
        self._check_size(ray.cluster_resources())
        # No retries: a task that died leaves its case unfinished, the parent reports it, and the same command retries.
        remote = ray.remote(run_in_process).options(**self._share, max_retries=0)
        of = {remote.remote(str(launch), task): task for task in range(tasks)}
        say(f"{tasks} tasks on Ray")
        left, ended, waiting = list(of), {}, waiting_until(END_S, over)
        while left and waiting():
            done, left = ray.wait(left, num_returns=1, timeout=_POLL_S)
            for reference in done:
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    ended[of[reference]] = f"{type(error).__name__}: {first_line(error)}"
        return ended

    def close(self) -> None:
        """Leave the cluster, which ends what runs there for this process. A cluster that was started here ends too."""
        if self._ray is not None:
            self._ray.shutdown()

    def _connect(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Otherwise Ray warns that a later version will treat tasks without a GPU differently.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray = load_engine("ray", self.name)

        terminate = signal.getsignal(signal.SIGTERM)
        try:
            dashboard = None if self._address else False
            ray.init(
                address=self._address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise UserError(
                f"Ray at hydra.launcher.address={self._address} does not answer: start it there by ray start --head, "
                "or let hydra.launcher.address=null start one here"
            ) from error
        # Ray's handler would end this process without cleaning up.
        signal.signal(signal.SIGTERM, terminate)
        self._ray = ray
        return ray

    def _check_size(self, there: dict[str, float]) -> None:
        """Raise UserError if the cluster cannot run even one task; Ray would wait for ever."""
        for key, resource in (("num_gpus", "GPU"), ("num_cpus", "CPU")):
            if self._share[key] > there.get(resource, 0):
                raise UserError(
                    f"hydra.launcher.{key}={self._share[key]} is more than the Ray cluster has ({resource}: "
                    f"{there.get(resource, 0):g}): lower it, or start nodes"
                )
