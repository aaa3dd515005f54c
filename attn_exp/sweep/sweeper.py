"""The sweeper: run the product of all choices, for sweeps of many short jobs.

Hydra's basic sweeper composes every job twice, and all jobs before the first one starts, and it repeats jobs that are
done. This one checks each choice instead of each combination, composes a combination of group choices once, skips jobs
that are done, and lists the jobs if `dry_run=true`. Hydra finds it as the plugin `hydra_plugins.attn_exp`.
"""

from collections.abc import Callable, Iterator, Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from attn_exp.config.compose import is_dry_run, isolation_options, resolved_config
from attn_exp.core.case import Case
from attn_exp.core.errors import UserError
from attn_exp.core.record import Record
from attn_exp.core.request import Request
from attn_exp.results.store import done_record
from attn_exp.sweep.dry_run import planned, print_plan
from attn_exp.sweep.launchers import Launcher, make_launcher
from attn_exp.sweep.parallel import launch
from attn_exp.sweep.plan import gpu_of
from attn_exp.sweep.product import Composer, check_choices, check_shared, combinations, varied_keys
from attn_exp.sweep.rival import check_rival
from attn_exp.sweep.task_function import SessionTask

Requests = dict[tuple[str, ...], Request | UserError]


def run_sweep(context: HydraContext, task: TaskFunction, config: DictConfig, arguments: Sequence[str]) -> None:
    """Run every combination of the choices in `arguments`, one job after another or in the tasks of a launcher.

    Args:
        context: Hydra's context, which has the loader of configurations.
        task: the task function of `attn-exp run`, which holds the session.
        config: the composed configuration without the sweep's choices.
        arguments: overrides; each may have several values.

    Raises:
        UserError: there is no possible job, or the launcher cannot run the jobs.
    """
    if not isinstance(task, SessionTask):
        raise UserError("hydra/sweeper=attn_exp runs the jobs of attn-exp and no others: choose hydra/sweeper=basic")
    loader = context.config_loader
    assert isinstance(loader, ConfigLoaderImpl)
    parser = OverridesParser.create(config_loader=loader)
    jobs = combinations(parser.parse_overrides(list(arguments)))
    if not jobs:
        raise UserError("there is no job in this sweep: one of its choices has no value")
    check_shared(jobs)
    setup_globals()
    composer = Composer(loader, config, task.session.request, jobs)
    ProductSweep(context, task, config, composer, jobs).run()


class ProductSweep:
    """One sweep over `jobs`, which are the overrides of each job in the order in which they run."""

    def __init__(
        self,
        context: HydraContext,
        task: SessionTask,
        config: DictConfig,
        composer: Composer,
        jobs: Sequence[tuple[str, ...]],
    ) -> None:
        self._context = context
        self._task = task
        self._session = task.session
        self._config = config
        self._composer = composer
        self._jobs = jobs

    def run(self) -> None:
        """Check the choices, then run the jobs that are possible and not done, or list them if it is a dry run."""
        check_rival(self._composer.case(self._jobs[0]), searches=False)
        launcher = self._launcher(self._composer.case(self._jobs[0]))
        if is_dry_run(self._config):
            check_choices(self._composer.request, self._jobs, self._checking)
            self._list()
            return
        # Requests that the check makes are kept until the sweep uses them, and no longer: a sweep may have ten thousand
        # jobs.
        checked: Requests = {}
        request = self._composer.request
        check_choices(
            lambda overrides: checked.get(overrides) or checked.setdefault(overrides, request(overrides)),
            self._jobs,
            self._checking,
        )
        self._session.progress.total = len(self._jobs)
        self._session.progress.options = varied_keys(self._jobs, "backend.")
        if launcher is not None:
            self._launch(launcher, checked)
            return
        # The next job is composed while the worker measures this one.
        self._session.ahead = 1
        for index, overrides, job in self._possible(checked):
            self._run(index, overrides, job)
        self._session.drain()

    def _checking(self, share: float) -> None:
        self._session.progress.doing("checking the choices", share)

    def _launcher(self, first: DictConfig) -> Launcher | None:
        """Return the launcher, or None if jobs run in this process. `device` then means the launcher's GPUs."""
        node = OmegaConf.to_container(self._config.hydra.launcher, resolve=True)
        assert isinstance(node, dict)
        options = {str(key): value for key, value in node.items()}
        name = OmegaConf.select(first, "isolation.name")
        launcher = make_launcher(options, str(OmegaConf.select(first, "device")), str(name), self._session.gpus)
        if launcher is not None:
            if self._config.hydra.callbacks or self._config.hydra.job.env_set:
                raise UserError(
                    "hydra.callbacks and hydra.job.env_set are for jobs of this process: leave launcher out"
                )
            self._session.gpus = launcher.gpus
        return launcher

    def _launch(self, launcher: Launcher, checked: Requests) -> None:
        first = self._composer.case(self._jobs[0])
        self._session.open(first)
        gpus = [gpu.uuid for gpu in launcher.gpus] if launcher.pinned else []
        settled: dict[Case, str | None] = {}

        def settle(done: Record) -> None:
            if gpus:
                settled.setdefault(done.request.case, gpu_of(done, gpus))

        requests = [request for *_, request in self._possible(checked, settle)]
        if requests:
            self._session.start_drawing(requests[0].device)
            launch(self._session, launcher, isolation_options(resolved_config(first)), requests, settled)

    def _run(self, index: int, overrides: tuple[str, ...], request: Request) -> None:
        if not self._config.hydra.callbacks and not self._config.hydra.job.env_set:
            # `run_job` copies the whole configuration four times, for settings that are not used here.
            self._session.submit(request, lambda: self._composer.case(overrides))
            return
        config = self._composer.compose(overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = index
        done = run_job(
            hydra_context=self._context,
            task_function=self._task,
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            configure_logging=False,
        )
        _ = done.return_value

    def _possible(
        self, checked: Requests, settle: Callable[[Record], None] = lambda done: None
    ) -> Iterator[tuple[int, tuple[str, ...], Request]]:
        """Yield the jobs to run, and count those that are impossible or done.

        Args:
            checked: requests that were made already.
            settle: called with the record of each job that is done.
        """
        current = self._session
        seen: set[str] = set()
        for index, overrides in enumerate(self._jobs):
            request = checked.pop(overrides, None) or self._composer.request(overrides)
            if isinstance(request, UserError):
                current.impossible.append(f"{' '.join(overrides)}: {request}")
                current.progress.total -= 1
                continue
            if request.job in seen:
                # Two spellings of one job: batch=1,01.
                current.progress.total -= 1
                continue
            seen.add(request.job)
            context = current.context
            done = done_record(request, context.folder / request.job) if context is not None else None
            if done is not None:
                current.keep(done, request)
                settle(done)
                continue
            yield index, overrides, request

    def _list(self) -> None:
        plans = [planned(self._session, self._composer.case(overrides)) for overrides in self._jobs]
        print_plan(self._session, plans, of_sweep=True)
