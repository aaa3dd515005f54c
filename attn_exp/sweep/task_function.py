"""The task function, which Hydra calls with each configuration. It holds the session that runs the jobs."""

import copy
import json
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

from attn_exp.core.case.fields import case_columns
from attn_exp.core.errors import UserError
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Request
from attn_exp.core.source import foreign_classes
from attn_exp.execution.capabilities import possible
from attn_exp.execution.session import Session
from attn_exp.results.store import done_record

# The keys of a record's configuration that belong to its job. All others (where results go, who measures, which
# profilers run) are this run's own: a record may be somebody else's.
OF_A_JOB = {
    *case_columns(),
    *("model", "seq_len", "embed_dim", "tp", "inputs", "compile", "caches", "passes", "seed", "regime", "l2"),
    *("deterministic", "determinism", "accumulate", "gold"),
}


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
            if config.dry_run:
                folder = Path(os.path.realpath(str(config.folder)))
                print_plan(self.session, possible([request], folder, self.session.progress), folder)
                return math.inf
            return self.session.submit([request], lambda: config)
        except UserError as error:
            # Hydra prints the overrides of a job that raises an Exception; the sentence is enough.
            raise SystemExit(error) from error


@dataclass(frozen=True)
class RecordsTask(SessionTask):
    """Measures the jobs of records again, the jobs of a case in turns."""

    records: Sequence[Record]

    def __call__(self, config: DictConfig) -> float:
        """Run the jobs, or list them in a dry run. Raises SystemExit if none can be measured here."""
        asked: dict[str, Request | UserError] = {}
        cases: dict[Any, list[Request]] = {}
        for record in self.records:
            try:
                request = self.session.request(with_job(config, record.request))
            except UserError as error:
                asked[record.request.job] = UserError(f"{record.request.label}: {error}")
                continue
            if request.job not in asked:
                cases.setdefault(request.turns_key, []).append(request)
            asked[request.job] = request
        impossible = [one for one in asked.values() if isinstance(one, UserError)]
        if not cases:
            raise SystemExit(impossible[0])
        if config.dry_run:
            folder = Path(os.path.realpath(str(config.folder)))
            print_plan(self.session, possible([*asked.values()], folder, self.session.progress), folder, of_sweep=True)
            return math.inf
        self.session.impossible += map(str, impossible)
        self.session.progress.total = len(asked) - len(impossible)
        for requests in cases.values():
            self.session.submit(requests, lambda: config)
        self.session.drain()
        return math.inf


def with_job(config: DictConfig, request: Request) -> DictConfig:
    """Return this run's configuration with the job of a record. Raises UserError if that names more than values."""
    kept = {key: request.config[key] for key in OF_A_JOB if key in request.config and key in config}
    timer = request.config.get("timer", {})
    kept |= {"backend": request.backend, "timer": {key: timer[key] for key in ("name", "also") if key in timer}}
    if foreign := foreign_classes(kept):
        raise UserError(f"its record names {foreign[0]}, which is not of this package")
    if "${" in json.dumps(kept):
        # A variable of this environment would be written into files that are handed on.
        raise UserError("its record has ${...}, which would be filled in here: measured records have values")
    composed = copy.deepcopy(config)
    for key, value in kept.items():
        # Older records lack options of the compiler, and a timer's class is this run's; a model or a backend has no
        # others than its own.
        OmegaConf.update(composed, key, value, merge=key in ("compile", "timer"), force_add=True)
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
