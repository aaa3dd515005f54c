"""Run: what Hydra runs for each configuration: a job of this process' session, or a line about it."""

import math
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from attn_exp.core.errors import UserError
from attn_exp.results.store import done_record
from attn_exp.run.session import Session, session


def task(config: DictConfig) -> float:
    """What Hydra runs for each job."""
    try:
        _check_launcher()
        if dry_run(config):
            session().request(config)
            print(dry_run_line(session(), config))
            return math.inf
        return session().submit(session().request(config), lambda: config)
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


def dry_run_line(current: Session, config: DictConfig) -> str:
    """One line about a job that is not started: whether it would run, and if not why."""
    try:
        request = current.request(config)
    except UserError as error:
        return f"{'impossible':<18} {error}"
    done = done_record(request, Path(config.folder).resolve() / request.job)
    what = f"done ({done.status})" if done else "would run"
    return f"{what:<18} {request.label}  on {request.device} by timer {request.measuring.timer}, folder {request.job}"


def dry_run(config: DictConfig) -> bool:
    """Whether to list the jobs only. Raises UserError for anything but true and false: it must not start by a typo."""
    if not isinstance(config.dry_run, bool):
        raise UserError(f"dry_run={config.dry_run} is neither true nor false")
    return config.dry_run
