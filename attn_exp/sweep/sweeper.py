"""Sweeper: Hydra's sweep over a product of choices, for sweeps of many short jobs.

Hydra's own sweeper composes every job twice, all of them before the first one starts, and knows nothing of jobs that
are done. This one checks the choices instead of their product, composes a combination of group choices once, skips
what is done, and lists instead of starting with `dry_run=true`. It stands on a private part of Hydra 1.3
(`Plugins.register`).
"""

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from attn_exp.config.compose import isolation_options, plain
from attn_exp.core.case import Case
from attn_exp.core.errors import UserError
from attn_exp.core.record import Record, Request
from attn_exp.results.store import done_record
from attn_exp.run.session import session
from attn_exp.sweep.launchers import Launcher, make_launcher
from attn_exp.sweep.plan import gpu_of
from attn_exp.sweep.product import Composer, check_choices, check_once, varied
from attn_exp.sweep.task_function import dry_run, dry_run_line

Asked = dict[tuple[str, ...], Request | UserError]


@dataclass
class SweeperConf:
    """`hydra.sweeper`: params are choices of the sweep, as on the command line, which wins."""

    _target_: str = "hydra_plugins.attn_exp.ProductSweeper"
    params: dict[str, str] | None = field(default=None)


class ProductSweeper(Sweeper):
    """Runs the product of all choices: one job after another in this process' session, or by a launcher's tasks."""

    # The only place that Hydra 1.3 takes plugins from.
    __module__ = "hydra_plugins.attn_exp"

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what a launch needs."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def sweep(self, arguments: list[str]) -> Any:
        """Run every combination of `arguments`.

        Raises:
            UserError: nothing that could be measured, or a launcher that cannot run it.
        """
        # Not at the top: Hydra's scan for plugins executes this module anew, and the class would be another one.
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        assert self.config is not None and self.hydra_context is not None and self.task_function is not None
        loader = self.hydra_context.config_loader
        assert isinstance(loader, ConfigLoaderImpl)
        parser = OverridesParser.create(config_loader=loader)
        params = [f"{key}={value}" for key, value in self.params.items()]
        found = BasicSweeper.split_arguments(parser.parse_overrides([*params, *arguments]), None)[0]
        jobs = [tuple(overrides) for overrides in found]
        if not jobs:
            raise UserError("there is no job in this sweep: one of its choices has no value")
        check_once(jobs)
        setup_globals()
        composer = Composer(loader, self.config, session().request, jobs)
        launcher = self._launcher(composer.case(jobs[0]))
        if dry_run(self.config):
            check_choices(composer.request, jobs)
            return self._list(composer, jobs)
        # What the check asks for is asked for again by the sweep, and kept until then: not longer, or a sweep of ten
        # thousand jobs would carry them all along.
        asked: Asked = {}
        check_choices(
            lambda overrides: asked.get(overrides) or asked.setdefault(overrides, composer.request(overrides)), jobs
        )
        current = session()
        current.progress.total = len(jobs)
        current.progress.options = varied(jobs, "backend.")
        if launcher is not None:
            return self._launch(launcher, composer, asked, jobs)
        # The next job is composed while the worker measures this one.
        current.ahead = 1
        for index, overrides, request in self._possible(composer, asked, jobs):
            self._run(composer, index, overrides, request)
        current.drain()
        return None

    def _launcher(self, first: DictConfig) -> Launcher | None:
        """Where the jobs run if not here; from then on `device` means the GPUs that are there."""
        assert self.config is not None
        node = OmegaConf.to_container(self.config.hydra.launcher, resolve=True)
        assert isinstance(node, dict)
        options = {str(key): value for key, value in node.items()}
        name = OmegaConf.select(first, "isolation.name")
        launcher = make_launcher(options, str(OmegaConf.select(first, "device")), str(name), session().gpus)
        if launcher is not None:
            if self.config.hydra.callbacks or self.config.hydra.job.env_set:
                raise UserError(
                    "hydra.callbacks and hydra.job.env_set are for jobs of this process: leave launcher out"
                )
            session().gpus = launcher.gpus
        return launcher

    def _launch(self, launcher: Launcher, composer: Composer, asked: Asked, jobs: Sequence[tuple[str, ...]]) -> None:
        from attn_exp.sweep.parallel import launch

        current = session()
        first = composer.case(jobs[0])
        current.open(first)
        gpus = [gpu.uuid for gpu in launcher.gpus] if launcher.pinned else []
        settled: dict[Case, str | None] = {}

        def settle(done: Record) -> None:
            if gpus:
                settled.setdefault(done.request.case, gpu_of(done, gpus))

        requests = [request for *_, request in self._possible(composer, asked, jobs, settle)]
        if requests:
            launch(current, launcher, isolation_options(plain(first)), requests, settled)

    def _run(self, composer: Composer, index: int, overrides: tuple[str, ...], request: Request) -> None:
        assert self.config is not None and self.hydra_context is not None and self.task_function is not None
        if not self.config.hydra.callbacks and not self.config.hydra.job.env_set:
            # Hydra's way copies the whole configuration four times, for settings that nobody made.
            session().submit(request, lambda: composer.case(overrides))
            return
        config = composer.compose(overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = index
        done = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            configure_logging=False,
        )
        _ = done.return_value

    def _possible(
        self,
        composer: Composer,
        asked: Asked,
        jobs: Sequence[tuple[str, ...]],
        settle: Callable[[Record], None] = lambda done: None,
    ) -> Iterator[tuple[int, tuple[str, ...], Request]]:
        """The jobs to run; the others are counted on the way.

        `settle` is told of each job that is done.
        """
        current = session()
        for index, overrides in enumerate(jobs):
            request = asked.pop(overrides, None) or composer.request(overrides)
            if isinstance(request, UserError):
                current.impossible.append(f"{' '.join(overrides)}: {request}")
                current.progress.total -= 1
                continue
            done = done_record(request, current.folder / request.job) if current.folder else None
            if done is not None:
                current.keep(done, request)
                settle(done)
                continue
            yield index, overrides, request

    def _list(self, composer: Composer, jobs: Sequence[tuple[str, ...]]) -> None:
        lines = [dry_run_line(session(), composer.case(overrides)) for overrides in jobs]
        print("\n".join(lines))
        words = [line.split(" ", 1)[0] for line in lines]
        print(
            f"{len(lines)} jobs: {words.count('would')} would run, {words.count('done')} are done, "
            f"{words.count('impossible')} are impossible"
        )


def register() -> None:
    """Make the sweeper known to Hydra, as `hydra/sweeper=attn_exp`."""
    ConfigStore.instance().store(group="hydra/sweeper", name="attn_exp", node=SweeperConf, provider="attn_exp")
    Plugins.instance().register(ProductSweeper)
    # hydra-ray-launcher, if it is installed, has a schema of this name that Hydra would hold against our file.
    ConfigStore.instance().repo["hydra"].get("launcher", {}).pop("ray.yaml", None)
    # Hydra imports a plugin by its name, and takes none from outside of the namespace package `hydra_plugins`.
    if "hydra_plugins" not in sys.modules and importlib.util.find_spec("hydra_plugins") is None:
        sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
    sys.modules[ProductSweeper.__module__] = sys.modules[__name__]
