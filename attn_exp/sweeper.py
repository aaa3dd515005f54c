"""Sweeper: Hydra's sweep over a product of choices, for sweeps of many short jobs.

Hydra's own sweeper composes every job twice, all of them before the first one starts, and knows nothing of jobs that
are done. This one checks the choices instead of their product, composes a combination of group choices once and
applies the plain values to a copy, skips what is done, and lists instead of starting with `dry_run=true`. It stands on
private parts of Hydra 1.3 (`Plugins.register`, `ConfigLoaderImpl._apply_overrides_to_config`); tests hold its
configurations against Hydra's.
"""

import copy
import functools
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from attn_exp.case import Case
from attn_exp.errors import UserError
from attn_exp.launchers import Launcher, make_launcher
from attn_exp.launchers.plan import gpu_of
from attn_exp.record import Record, Request
from attn_exp.run import dry_run, dry_run_line, isolation_options, plain, session
from attn_exp.store import done_record

# How many combinations are tried before a choice is called impossible in all of them.
_TRIES = 64
# What all jobs of a sweep share.
_ONCE = (
    *("sweep", "folder", "tracker", "isolation", "device", "dry_run", "plots"),
    *("profiler", "profiler_timeout_s"),
)
# What a job's overrides ask for, or why that is impossible.
Ask = Callable[[tuple[str, ...]], Request | UserError]
Asked = dict[tuple[str, ...], Request | UserError]


@dataclass
class SweeperConf:
    """`hydra.sweeper`: params are choices of the sweep, as on the command line, which wins."""

    _target_: str = "hydra_plugins.attn_exp.ProductSweeper"
    params: dict[str, str] | None = field(default=None)


class Composer:
    """Composes the jobs of one sweep as Hydra would, only faster."""

    def __init__(self, loader: ConfigLoaderImpl, master: DictConfig) -> None:
        self._loader = loader
        self._master = master
        self._parser = OverridesParser.create()
        self._bases: dict[tuple[str, ...], tuple[DictConfig, DictConfig]] = {}
        self._parsed = functools.cache(self._parse)

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of one job, `hydra` node included. Raises Hydra's own errors."""
        (base, _), values = self._base(overrides)
        config = copy.deepcopy(base)
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        parsed = [self._parsed(text)[0] for text in overrides]
        own = [override for override in parsed if not override.is_hydra_override()]
        names = config.hydra.job.config.override_dirname
        with open_dict(config.hydra):
            config.hydra.overrides.task = [override.input_line for override in own]
            config.hydra.job.override_dirname = get_overrides_dirname(
                own, kv_sep=names.kv_sep, item_sep=names.item_sep, exclude_keys=names.exclude_keys
            )
        return config

    def case(self, overrides: Sequence[str]) -> DictConfig:
        """The same without the `hydra` node, which is most of it and says nothing about the job."""
        (_, base), values = self._base(overrides)
        config = copy.deepcopy(base)
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    def request(self, overrides: Sequence[str]) -> Request | UserError:
        """The job, or why it is impossible. Raises Hydra's own errors."""
        return _request(self.case(overrides))

    def _base(self, overrides: Sequence[str]) -> tuple[tuple[DictConfig, DictConfig], list[Override]]:
        """What the group choices make, whole and without the `hydra` node, and the plain values to apply to it."""
        parsed = [self._parsed(text) for text in overrides]
        groups = tuple(text for text, (_, composed) in zip(overrides, parsed, strict=True) if composed)
        if groups not in self._bases:
            whole = self._loader.load_sweep_config(self._master, list(groups))
            without = copy.deepcopy(whole)
            with open_dict(without):
                del without["hydra"]
            self._bases[groups] = whole, without
        return self._bases[groups], [override for override, composed in parsed if not composed]

    def _parse(self, text: str) -> tuple[Override, bool]:
        """An override, and whether Hydra has to compose it anew: as hydra/_internal/defaults_list.py decides."""
        override = self._parser.parse_overrides([text])[0]
        if not override.key_or_group:
            # Hydra's grammar lets it pass, and an assertion fails later.
            raise UserError(f"'{text}' is not of the form key=value, for example backend=flash or batch=1,8,16")
        group = self._loader.repository.group_exists(override.key_or_group)
        return override, (group and not isinstance(override.value(), dict)) or override.is_hydra_override()


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
        _check_once(jobs)
        setup_globals()
        composer = Composer(loader, self.config)
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
        if launcher is not None:
            return self._launch(launcher, composer, asked, jobs)
        # The next job is composed while the worker measures this one.
        current.ahead = 1
        for index, overrides, case, _ in self._possible(composer, asked, jobs):
            self._run(composer, index, overrides, case)
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
        from attn_exp.launchers.sweep import launch

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

    def _run(self, composer: Composer, index: int, overrides: tuple[str, ...], case: DictConfig | None) -> None:
        assert self.config is not None and self.hydra_context is not None and self.task_function is not None
        if not self.config.hydra.callbacks and not self.config.hydra.job.env_set:
            # Hydra's way copies the whole configuration four times, for settings that nobody made.
            self.task_function(case if case is not None else composer.case(overrides))
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
    ) -> Iterator[tuple[int, tuple[str, ...], DictConfig | None, Request]]:
        """The jobs to run, with their configurations where those were composed; the others are counted on the way.

        `settle` is told of each job that is done.
        """
        current = session()
        for index, overrides in enumerate(jobs):
            case = None
            request = asked.pop(overrides, None)
            if request is None:
                case = composer.case(overrides)
                request = _request(case)
            if isinstance(request, UserError):
                current.impossible.append(f"{' '.join(overrides)}: {request}")
                current.progress.total -= 1
                continue
            done = done_record(request, current.folder / request.job) if current.folder else None
            if done is not None:
                current.keep(done)
                settle(done)
                continue
            yield index, overrides, case, request

    def _list(self, composer: Composer, jobs: Sequence[tuple[str, ...]]) -> None:
        lines = [dry_run_line(session(), composer.case(overrides)) for overrides in jobs]
        print("\n".join(lines))
        words = [line.split(" ", 1)[0] for line in lines]
        print(
            f"{len(lines)} jobs: {words.count('would')} would run, {words.count('done')} are done, "
            f"{words.count('impossible')} are impossible"
        )


def _request(case: DictConfig) -> Request | UserError:
    try:
        return session().request(case)
    except UserError as error:
        return error


def _check_once(jobs: Sequence[tuple[str, ...]]) -> None:
    """Raise UserError if a sweep runs over something that it has one of."""
    for values in zip(*jobs, strict=True):
        key = values[0].partition("=")[0].lstrip("+~")
        if len(set(values)) > 1 and key.split(".")[0] in _ONCE:
            if key == "profiler":
                names = ",".join(dict.fromkeys(value.partition("=")[2] for value in values))
                raise UserError(f"several profilers of one job stand in brackets: profiler=[{names}]")
            raise UserError(f"{key} is one for the whole sweep: give it a single value, or start several sweeps")


def check_choices(request: Ask, jobs: Sequence[tuple[str, ...]]) -> None:
    """Raise on a choice that no combination makes possible, before anything is started.

    One combination is composed for every value of every choice, not their product; where that one is impossible,
    others with the same value are tried. Hydra's errors (an unknown key or option) pass through.
    """
    axes = [list(dict.fromkeys(column)) for column in zip(*jobs, strict=True)]
    first = [axis[0] for axis in axes]
    for position, axis in enumerate(axes):
        for value in axis:
            asked = request((*first[:position], value, *first[position + 1 :]))
            if not isinstance(asked, UserError):
                continue
            others = itertools.product(*axes[:position], [value], *axes[position + 1 :])
            if all(isinstance(request(other), UserError) for other in itertools.islice(others, _TRIES)):
                raise asked


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
