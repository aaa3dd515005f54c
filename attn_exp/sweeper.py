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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from attn_exp.errors import UserError
from attn_exp.run import dry_run_line, session
from attn_exp.store import final_record

# How many combinations are tried before a choice is called impossible in all of them.
_TRIES = 64


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
        self._bases: dict[tuple[str, ...], DictConfig] = {}
        self._parsed = functools.cache(self._parse)

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of one job, `hydra` node included. Raises Hydra's own errors."""
        parsed = [self._parsed(text) for text in overrides]
        groups = tuple(text for text, (_, is_group) in zip(overrides, parsed, strict=True) if is_group)
        values = [override for override, is_group in parsed if not is_group]
        if groups not in self._bases:
            self._bases[groups] = self._loader.load_sweep_config(self._master, list(groups))
        config = copy.deepcopy(self._bases[groups])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        with open_dict(config.hydra):
            config.hydra.overrides.task = [text for text in overrides if not text.startswith("hydra.")]
        return config

    def _parse(self, text: str) -> tuple[Override, bool]:
        override = self._parser.parse_overrides([text])[0]
        # As Hydra decides: hydra/_internal/defaults_list.py, _split_overrides.
        group = self._loader.repository.group_exists(override.key_or_group)
        whole = override.is_hydra_override() or override.is_delete()
        return override, (group and not isinstance(override.value(), dict)) or whole


class ProductSweeper(Sweeper):
    """Runs the product of all choices, one job after another in this process' session."""

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
            UserError: nothing that could be measured, or a launcher other than Hydra's basic one.
        """
        # Not at the top: Hydra's scan for plugins executes this module anew, and the class would be another one.
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        assert self.config is not None and self.hydra_context is not None and self.task_function is not None
        if not self.config.hydra.launcher._target_.endswith(".BasicLauncher"):
            raise UserError("only hydra/launcher=basic is supported: leave hydra/launcher out")
        loader = self.hydra_context.config_loader
        assert isinstance(loader, ConfigLoaderImpl)
        parser = OverridesParser.create(config_loader=loader)
        params = [f"{key}={value}" for key, value in self.params.items()]
        jobs = BasicSweeper.split_arguments(parser.parse_overrides([*params, *arguments]), None)[0]
        setup_globals()
        composer = Composer(loader, self.config)
        check_choices(composer, jobs)
        if self.config.dry_run:
            return self._list(composer, jobs)
        current = session()
        current.progress.total = len(jobs)
        # The next job is composed while the worker measures this one.
        current.ahead = 1
        for index, config in self._possible(composer, jobs):
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
        return None

    def _possible(self, composer: Composer, jobs: Sequence[Sequence[str]]) -> Iterator[tuple[int, DictConfig]]:
        current = session()
        for index, overrides in enumerate(jobs):
            config = composer.compose(overrides)
            try:
                request = current.request(config)
            except UserError as error:
                current.impossible.append(f"{' '.join(overrides)}: {error}")
                current.progress.total -= 1
                continue
            done = final_record(current.folder / request.job) if current.folder else None
            if done is not None:
                current.keep(done)
                continue
            yield index, config

    def _list(self, composer: Composer, jobs: Sequence[Sequence[str]]) -> None:
        lines = [dry_run_line(session(), composer.compose(overrides)) for overrides in jobs]
        print("\n".join(lines))
        words = [line.split(" ", 1)[0] for line in lines]
        print(
            f"{len(lines)} jobs: {words.count('would')} would run, {words.count('done')} are done, "
            f"{words.count('impossible')} are impossible"
        )


def check_choices(composer: Composer, jobs: Sequence[Sequence[str]]) -> None:
    """Raise on a choice that no combination makes possible, before anything is started.

    One combination is composed for every value of every choice, not their product; where that one is impossible,
    others with the same value are tried. Hydra's errors (an unknown key or option) pass through.
    """
    axes = [list(dict.fromkeys(column)) for column in zip(*jobs, strict=True)]
    first = [axis[0] for axis in axes]
    for position, axis in enumerate(axes):
        for value in axis:
            error = _impossible(composer, [*first[:position], value, *first[position + 1 :]])
            if error is None:
                continue
            others = itertools.product(*axes[:position], [value], *axes[position + 1 :])
            if all(_impossible(composer, list(other)) for other in itertools.islice(others, _TRIES)):
                raise error


def _impossible(composer: Composer, overrides: Sequence[str]) -> UserError | None:
    try:
        session().request(composer.compose(overrides))
    except UserError as error:
        return error
    return None


def register() -> None:
    """Make the sweeper known to Hydra, as `hydra/sweeper=attn_exp`."""
    ConfigStore.instance().store(group="hydra/sweeper", name="attn_exp", node=SweeperConf, provider="attn_exp")
    Plugins.instance().register(ProductSweeper)
    # Hydra imports a plugin by its name, and takes none from outside of the namespace package `hydra_plugins`.
    if importlib.util.find_spec("hydra_plugins") is None:
        sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
    sys.modules[ProductSweeper.__module__] = sys.modules[__name__]
