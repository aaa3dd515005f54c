"""The task function: what Hydra calls for each configuration. It holds the session that runs the jobs."""

import math
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from attn_exp.config.compose import is_dry_run
from attn_exp.core.errors import UserError
from attn_exp.results.store import done_record
from attn_exp.run.session import Session


@dataclass(frozen=True)
class SessionTask:
    """Run each configuration in one session, or print a line about it if it is a dry run.

    Hydra hands its task function to the sweeper, and that is how the sweeper gets the session.
    """

    session: Session

    def __call__(self, config: DictConfig) -> float:
        """Run the job of one composed configuration; return its time in microseconds, for sweepers that optimise."""
        try:
            _check_launcher()
            request = self.session.request(config)
            if is_dry_run(config):
                print(dry_run_line(self.session, config))
                return math.inf
            return self.session.submit(request, lambda: config)
        except UserError as error:
            # Hydra would print the overrides of a job that raises an Exception; the sentence says it all.
            raise SystemExit(error) from error


def _check_launcher() -> None:
    """Raise UserError for a launcher without -m: Hydra would run the job here, and not say so."""
    if not HydraConfig.initialized() or HydraConfig.get().mode == RunMode.MULTIRUN:
        return
    name = OmegaConf.select(HydraConfig.get().launcher, "name")
    if name is not None:
        raise UserError(f"hydra/launcher={name} needs -m (--multirun): python -m attn_exp -m ...")


def dry_run_line(session: Session, config: DictConfig) -> str:
    """One line about a job that is not started: whether it would run, and if not why."""
    try:
        request = session.request(config)
    except UserError as error:
        return f"{'impossible':<18} {error}"
    done = done_record(request, Path(config.folder).resolve() / request.job)
    what = f"done ({done.status})" if done else "would run"
    return f"{what:<18} {request.label}  on {request.device} by timer {request.measuring.timer}, folder {request.job}"
