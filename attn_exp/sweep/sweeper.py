"""The sweeper: run the product of all choices, for sweeps of many short jobs.

Hydra's basic sweeper composes every job twice, and all jobs before the first one starts, and it repeats jobs that are
done. This one checks each choice instead of each combination, composes a combination of group choices once, skips jobs
that are done, and lists the jobs if `dry_run=true`. Hydra finds it as the plugin `hydra_plugins.attn_exp`.
"""

import itertools
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from attn_exp.config.compose import dictionary
from attn_exp.core.case.case import Case
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.core.record.request import Request
from attn_exp.execution.capabilities import possible
from attn_exp.execution.session import Session
from attn_exp.results.store import done_record
from attn_exp.sweep.launcher import Launcher
from attn_exp.sweep.parallel import launch
from attn_exp.sweep.product import (
    NO_RIVALS,
    Composer,
    case_by_case,
    check_choices,
    check_shared,
    chosen_backend,
    combinations,
    of_every_backend,
    varied_keys,
    without_rivals,
)
from attn_exp.sweep.task_function import SessionTask, print_plan

_LAUNCHERS = ("local_gpus", "slurm", "ray")
Requests = dict[tuple[str, ...], Request | UserError]


def run_sweep(context: HydraContext, task: TaskFunction, config: DictConfig, arguments: Sequence[str]) -> None:
    """Run every combination of the choices in `arguments`, one job after another or in the tasks of a launcher.

    `config` is the composed configuration without the sweep's choices. Raises UserError if there is no possible job, or
    the launcher cannot run the jobs.
    """
    if not isinstance(task, SessionTask):
        raise UserError("hydra/sweeper=attn_exp runs the jobs of attn-exp and no others: choose hydra/sweeper=basic")
    if config.hydra.callbacks or config.hydra.job.env_set:
        raise UserError("hydra.callbacks and hydra.job.env_set need hydra/sweeper=basic")
    loader = context.config_loader
    assert isinstance(loader, ConfigLoaderImpl)
    parser = OverridesParser.create(config_loader=loader)
    parsed = parser.parse_overrides(list(arguments))
    every = of_every_backend(parsed)
    jobs = [job for job in combinations(parsed) if not (every and chosen_backend(job) in NO_RIVALS)]
    if not jobs:
        raise UserError("there is no job in this sweep: one of its choices has no value")
    check_shared(jobs, dictionary(config, resolve=False))
    setup_globals()
    composer = Composer(loader, config, task.session.request, jobs)
    _ProductSweep(task.session, config, composer, jobs).run(every=every)


class _ProductSweep:
    """One sweep over `jobs`, which are the overrides of each job in the order in which they run."""

    def __init__(
        self, session: Session, config: DictConfig, composer: Composer, jobs: Sequence[tuple[str, ...]]
    ) -> None:
        self._session = session
        self._config = config
        self._composer = composer
        self._jobs = case_by_case(composer.distinct(jobs))

    def run(self, *, every: bool) -> None:
        """Check the choices, then run the jobs that are possible and not done, or list them if it is a dry run.

        Of `every` backend, those that cannot be measured here are left out.
        """
        launcher = self._launcher(self._composer.case(self._jobs[0]))
        # Requests that the check makes are kept until the sweep uses them, and no longer: a sweep may have ten thousand
        # jobs.
        checked: Requests = {}
        request = self._composer.request
        check_choices(
            lambda overrides: checked.get(overrides) or checked.setdefault(overrides, request(overrides)),
            self._jobs,
            lambda share: self._session.progress.line.show("checking the choices", done=share, total=1.0),
        )
        for line in self._composer.lacking(self._jobs):
            self._session.progress.note(line)
        if every or self._config.dry_run:
            # That of the first job, as in a sweep that runs.
            folder = Path(os.path.realpath(str(self._composer.case(self._jobs[0]).folder)))
            planned = {overrides: checked.get(overrides) or request(overrides) for overrides in self._jobs}
            if launcher is None or launcher.pinned:
                asked = possible(list(planned.values()), folder, self._session.progress)
                if every:
                    self._keep([one for one, there in zip(planned, asked, strict=True) if there is planned[one]])
                planned |= zip(planned, asked, strict=True)
            if self._config.dry_run:
                print_plan(self._session, [planned[overrides] for overrides in self._jobs], folder, of_sweep=True)
                return
        self._session.progress.total = len(self._jobs)
        self._session.progress.options = varied_keys(self._jobs, "backend.")
        if launcher is not None:
            self._launch(launcher, checked)
            return
        # The next case is composed while the worker measures this one.
        self._session.ahead = 1
        for overrides, requests in self._cases(checked):
            self._session.submit(requests, lambda overrides=overrides: self._composer.case(overrides))  # type: ignore[misc]
        self._session.drain()

    def _launcher(self, first: DictConfig) -> Launcher | None:
        """Return the launcher, or None if jobs run in this process. `device` then means the launcher's GPUs."""
        options = dictionary(self._config.hydra.launcher, resolve=True)
        name = OmegaConf.select(first, "isolation.name")
        launcher = _make_launcher(options, str(OmegaConf.select(first, "device")), str(name), self._session.gpus)
        if launcher is not None:
            self._session.gpus = launcher.gpus
        return launcher

    def _launch(self, launcher: Launcher, checked: Requests) -> None:
        session = self._session
        context = session.open(self._composer.case(self._jobs[0]))
        gpus = [gpu.uuid for gpu in launcher.gpus] if launcher.pinned else []
        settled: dict[Case, str | None] = {}
        left = list[Request]()
        for _, requests in self._cases(checked):
            for request in requests:
                done = done_record(request, context.folder / request.job)
                if done is None:
                    left.append(request)
                    continue
                session.keep(done, request)
                if gpus:
                    gpu = done.request.gpu_uuid
                    settled.setdefault(done.request.case, gpu if gpu in gpus else None)
        if left:
            launch(session, launcher, left, settled)

    def _cases(self, checked: Requests) -> Iterator[tuple[tuple[str, ...], list[Request]]]:
        """Yield the possible jobs of each case that are to be measured in turns, with the overrides of the first.

        They are composed when they are asked for, and those that are impossible are counted.
        """
        seen: set[str] = set()
        for _, jobs in itertools.groupby(self._jobs, key=without_rivals):
            cases: dict[Any, tuple[tuple[str, ...], list[Request]]] = {}
            for overrides in jobs:
                request = checked.pop(overrides, None) or self._composer.request(overrides)
                if isinstance(request, UserError):
                    self._session.impossible.append(f"{' '.join(overrides)}: {request}")
                    self._session.progress.total -= 1
                elif request.job in seen:
                    # Two spellings of one job: batch=1,01.
                    self._session.progress.total -= 1
                else:
                    seen.add(request.job)
                    cases.setdefault(request.turns_key, (overrides, []))[1].append(request)
            yield from cases.values()

    def _keep(self, jobs: list[tuple[str, ...]]) -> None:
        """Leave the other jobs out, and say of how many backends there is none. Raises UserError for no job."""
        if not jobs:
            case = shlex.join(without_rivals(self._jobs[0]))
            raise UserError(f"no backend can compute this here: attn-exp backends {case} says why")
        names, left = set(map(chosen_backend, self._jobs)), set(map(chosen_backend, jobs))
        if names > left:
            self._session.progress.note(f"{len(names - left)} of {len(names)} cannot run here: attn-exp backends")
        self._jobs = jobs


def _make_launcher(node: Mapping[str, Any], device: str, isolation: str, gpus: list[GpuInfo]) -> Launcher | None:
    """Return the launcher that `hydra.launcher` chooses, or None for Hydra's basic launcher, which is this process.

    Raises UserError if there is no such launcher, its engine is not installed, or it cannot run these jobs.
    """
    name = node.get("name")
    if name is None and str(node.get("_target_")).endswith(".BasicLauncher"):
        return None
    if name not in _LAUNCHERS:
        typed = name or node.get("_target_")
        near = nearest(str(typed), _LAUNCHERS)
        raise UserError(
            f"launcher {typed} is none of {', '.join(_LAUNCHERS)}: {near}choose one, or leave hydra/launcher out"
        )
    if isolation == "none":
        raise UserError(f"isolation=none measures in this process: leave hydra/launcher={name} or isolation=none out")
    if name == "local_gpus":
        from attn_exp.sweep.task import LocalGpus

        return LocalGpus(device, gpus)
    if name == "slurm":
        from attn_exp.sweep.slurm import Slurm

        return Slurm(dict(node), device)
    from attn_exp.sweep.ray import Ray

    return Ray(dict(node), device)
