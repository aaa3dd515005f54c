"""The task function, which Hydra calls with each configuration. It holds the session that runs the jobs."""

import copy
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from attn_exp.config.compose import is_dry_run
from attn_exp.config.overrides import override_key
from attn_exp.core.errors import UserError
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Request
from attn_exp.execution.capabilities import possible
from attn_exp.execution.session import Session
from attn_exp.results.store import done_record

# Keys of a kept configuration that are not the job's, but those of the sweep and the machine that measured it.
_OF_A_RUN = ("sweep", "device", "isolation", "profiler", "stop_on")


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


@dataclass(frozen=True)
class RecordsTask(SessionTask):
    """Measures the jobs of records again, each with the configuration that its record keeps.

    What was typed counts instead, and so does this run's own isolation and profilers: a record may be somebody else's.
    """

    records: Sequence[Record]
    typed: Sequence[str]

    def __call__(self, config: DictConfig) -> float:
        """Run the jobs of a case in turns, case after case."""
        cases: dict[Any, tuple[DictConfig, dict[str, Request]]] = {}
        for record in self.records:
            own = self._composed(config, record)
            try:
                request = self.session.request(own)
            except UserError as error:
                self.session.impossible.append(f"{record.request.label}: {error}")
                continue
            cases.setdefault(request.turns_key, (own, {}))[1][request.job] = request
        if is_dry_run(config):
            folder = Path(os.path.realpath(str(config.folder)))
            print_plan(self.session, [one for _, case in cases.values() for one in case.values()], folder)
            return math.inf
        self.session.progress.total = sum(len(case) for _, case in cases.values())
        for first, case in cases.values():
            self.session.submit(list(case.values()), lambda own=first: own)  # type: ignore[misc]
        self.session.drain()
        return math.inf

    def _composed(self, config: DictConfig, record: Record) -> DictConfig:
        composed = copy.deepcopy(config)
        for key, value in record.request.config.items():
            if key in config and key not in _OF_A_RUN:
                OmegaConf.update(composed, key, value, merge=False, force_add=True)
        for key in map(override_key, self.typed):
            OmegaConf.update(composed, key, OmegaConf.select(config, key), merge=False, force_add=True)
        return composed


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
