"""The task function, which Hydra calls with each configuration. It holds the session that runs the jobs."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from attn_exp.config.compose import is_dry_run
from attn_exp.core.errors import UserError
from attn_exp.core.record.request import Request
from attn_exp.execution.capabilities import possible
from attn_exp.execution.session import Session
from attn_exp.results.store import done_record


@dataclass(frozen=True)
class SessionTask:
    """Runs each configuration in one session, or prints a line about it in a dry run.

    Hydra hands the task function to the sweeper, which takes the session from it.
    """

    session: Session

    def __call__(self, config: DictConfig) -> float:
        """Run the job of one composed configuration; return its time in microseconds, for sweepers that optimise."""
        try:
            _check_launcher()
            request = self.session.request(config)
            if is_dry_run(config):
                folder = Path(os.path.realpath(str(config.folder)))
                print_plan(self.session, possible([request], folder, self.session.progress), folder)
                return math.inf
            return self.session.submit([request], lambda: config)
        except UserError as error:
            # Hydra prints the overrides of a job that raises an Exception; the sentence is enough.
            raise SystemExit(error) from error


def _check_launcher() -> None:
    """Raise UserError for a launcher without -m: Hydra would silently run the job in this process."""
    if not HydraConfig.initialized() or HydraConfig.get().mode == RunMode.MULTIRUN:
        return
    name = OmegaConf.select(HydraConfig.get().launcher, "name")
    if name is not None:
        raise UserError(f"hydra/launcher={name} needs -m (--multirun): python -m attn_exp -m ...")


def print_plan(
    session: Session, requests: Sequence[Request | UserError], folder: Path, *, of_sweep: bool = False
) -> None:
    """Print for each job of a sweep's folder whether it would run, is done, or is impossible."""
    session.progress.line.close()
    counts = Counter[str]()
    for request in requests:
        if isinstance(request, UserError):
            what, text = "impossible", str(request)
        else:
            done = done_record(request, folder / request.job)
            what = f"done ({done.status})" if done else "would run"
            text = f"{request.label}  on {request.device} by timer {request.measuring.timer}, folder {request.job}"
        counts[what.partition(" (")[0]] += 1
        print(f"{what:<18} {text}")
    if of_sweep:
        counted = f"{counts['would run']} would run, {counts['done']} are done, {counts['impossible']} are impossible"
        print(f"{len(requests)} job{'s' * (len(requests) != 1)}: {counted}")
