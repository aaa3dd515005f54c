"""Compose the jobs of a sweep as Hydra would, only faster, and check its choices before anything is started.

This uses private parts of Hydra 1.3 (`ConfigLoaderImpl._apply_overrides_to_config`, `load_sweep_config`); tests compare
its configurations with Hydra's.
"""

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from attn_exp.config.overrides import override_key
from attn_exp.core.errors import UserError, first_line
from attn_exp.core.request import Request

# How many combinations are tried before a choice is taken to be impossible in all of them.
_TRIES = 64
# At a second a job these take more than a day.
_MOST_JOBS = 100_000
# Keys that a sweep has one value of.
_SHARED = (
    *("sweep", "folder", "tracker", "isolation", "device", "dry_run", "save_plots", "columns", "format", "quiet"),
    *("private", "gpu_wait_s", "rival", "profiler", "profiler_timeout_s"),
)
# The overrides of one job, in the order of the sweep's choices.
Overrides = Sequence[str]
# Makes the request of a job from its overrides, or the reason why the job is impossible.
MakeRequest = Callable[[tuple[str, ...]], Request | UserError]


class _Base:
    """The configuration of a combination of group choices: whole, and without Hydra's node."""

    def __init__(self, whole: DictConfig, shared: Sequence[Override]) -> None:
        self.whole = whole
        # Hydra's node is the largest part, and says nothing about the job.
        self.own = copy.deepcopy(whole)
        with open_dict(self.own):
            del self.own["hydra"]
        ConfigLoaderImpl._apply_overrides_to_config(list(shared), self.own)
        original = OmegaConf.to_container(self.own, resolve=False)
        assert isinstance(original, dict)
        self._original: dict[Any, Any] = original

    def restore(self, tops: Iterable[str]) -> None:
        """Restore the top-level nodes of these names."""
        with open_dict(self.own):
            for top in tops:
                if top in self._original:
                    self.own[top] = self._original[top]
                else:
                    self.own.pop(top, None)


class Composer:
    """Composes the jobs of one sweep as Hydra would, only faster.

    Each combination of group choices is composed once, and overrides that all jobs share are applied to it once.

    Args:
        loader: Hydra's.
        master: the composed configuration without the sweep's choices.
        ask: makes a request of a configuration without Hydra's node.
        jobs: the overrides of all jobs. If they are given, only combinations of their choices may be composed.
    """

    def __init__(
        self,
        loader: ConfigLoaderImpl,
        master: DictConfig,
        ask: Callable[[DictConfig], Request],
        jobs: Sequence[Overrides] = (),
    ) -> None:
        self._loader = loader
        self._master = master
        self._ask = ask
        self._parser = OverridesParser.create()
        self._parsed = functools.cache(self._parse)
        self._bases: dict[tuple[str, ...], _Base] = {}
        self._shared = self._find_shared(jobs)

    def compose(self, overrides: Overrides) -> DictConfig:
        """Return the configuration of one job with its `hydra` node. Raises Hydra's errors."""
        parsed = [self._parsed(text) for text in overrides]
        config = copy.deepcopy(self._base(overrides).whole)
        ConfigLoaderImpl._apply_overrides_to_config([value for value, composed in parsed if not composed], config)
        own = [override for override, _ in parsed if not override.is_hydra_override()]
        names = config.hydra.job.config.override_dirname
        with open_dict(config.hydra):
            config.hydra.overrides.task = [override.input_line for override in own]
            config.hydra.job.override_dirname = get_overrides_dirname(
                own, kv_sep=names.kv_sep, item_sep=names.item_sep, exclude_keys=names.exclude_keys
            )
        return config

    def case(self, overrides: Overrides) -> DictConfig:
        """Return the configuration of one job without its `hydra` node. Raises Hydra's errors."""
        config = copy.deepcopy(self._base(overrides).own)
        ConfigLoaderImpl._apply_overrides_to_config(self._values(overrides), config)
        return config

    def request(self, overrides: Overrides) -> Request | UserError:
        """Return the request of one job, or why the job is impossible. Raises Hydra's errors."""
        base, values = self._base(overrides), self._values(overrides)
        # The base is changed and restored: a copy for each job would take as long as everything else.
        tops = {_top(override) for override in values}
        try:
            ConfigLoaderImpl._apply_overrides_to_config(values, base.own)
            return self._ask(base.own)
        except UserError as error:
            return error
        finally:
            base.restore(tops)

    def _base(self, overrides: Overrides) -> _Base:
        groups = tuple(text for text in overrides if self._parsed(text)[1])
        if groups not in self._bases:
            whole = self._loader.load_sweep_config(self._master, list(groups))
            self._bases[groups] = _Base(whole, list(self._shared.values()))
        return self._bases[groups]

    def _values(self, overrides: Overrides) -> list[Override]:
        """Return the overrides of single values that the base does not have yet."""
        parsed = [self._parsed(text) for position, text in enumerate(overrides) if position not in self._shared]
        return [override for override, composed in parsed if not composed]

    def _find_shared(self, jobs: Sequence[Overrides]) -> dict[int, Override]:
        """Return the single values that all jobs share, by position, except in nodes that another choice changes."""
        columns = [[self._parsed(text) for text in dict.fromkeys(column)] for column in zip(*jobs, strict=True)]
        single = {position: column[0] for position, column in enumerate(columns) if len(column) == 1}
        changed = {_top(override) for column in columns if len(column) > 1 for override, _ in column}
        # Adding and deleting depend on what exists, which another choice may have changed, so these overrides keep
        # their place, and so do those that change the same node.
        changed |= {_top(override) for override, _ in single.values() if override.is_add() or override.is_delete()}
        return {
            position: override
            for position, (override, composed) in single.items()
            if not composed and _top(override) not in changed
        }

    def _parse(self, text: str) -> tuple[Override, bool]:
        """Return the parsed override, and whether Hydra must compose for it (hydra/_internal/defaults_list.py)."""
        override = self._parser.parse_overrides([text])[0]
        if not override.key_or_group:
            # Hydra's grammar accepts this, and an assertion fails later.
            raise UserError(f"'{text}' is not of the form key=value, for example backend=flash or batch=1,8,16")
        group = self._loader.repository.group_exists(override.key_or_group)
        return override, (group and not isinstance(override.value(), dict)) or override.is_hydra_override()


def _top(override: Override) -> str:
    """Return the name of the top-level node that an override changes."""
    return re.split(r"[.\[@]", override.key_or_group, maxsplit=1)[0]


def combinations(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """Return the overrides of each combination of values, each once: of batch=1,1 there is one.

    Raises:
        UserError: there are too many.
    """
    _check_number(overrides)
    return list(dict.fromkeys(map(tuple, BasicSweeper.split_arguments(list(overrides), None)[0])))


def parsed_combinations(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the words of each combination of values (`batch=1,8`, `seq_len=range(64,257,64)`).

    Raises:
        UserError: a word that Hydra cannot read, or too many combinations.
    """
    try:
        return combinations(OverridesParser.create().parse_overrides(list(words)))
    except HydraException as error:
        raise UserError(f"{first_line(error)}: write KEY=VALUE,VALUE or KEY=range(FROM,TO,STEP)") from error


def _check_number(overrides: Iterable[Override]) -> None:
    """Raise UserError if there are more combinations than anybody waits for, before any of them is made."""
    numbers = {override.key_or_group: _number(override) for override in overrides}
    total = math.prod(numbers.values())
    if total > _MOST_JOBS:
        largest = max(numbers, key=lambda key: numbers[key])
        raise UserError(
            f"{total:,} combinations, of {numbers[largest]:,} values of {largest}, are more than {_MOST_JOBS:,}: "
            f"give fewer, for example {largest}=1,8,64 or {largest}=range(1,1000,100)"
        )


def _number(override: Override) -> int:
    """Return how many values an override has, without making them."""
    value = override.value()
    if isinstance(value, RangeSweep):
        assert value.start is not None and value.stop is not None
        return max(0, math.ceil((value.stop - value.start) / value.step))
    return max(1, len(value.list)) if isinstance(value, ChoiceSweep) else 1


def check_shared(jobs: Sequence[Overrides]) -> None:
    """Raise UserError if a sweep has several values of a key in `_SHARED`."""
    for values in zip(*jobs, strict=True):
        key = override_key(values[0])
        if len(set(values)) > 1 and key.split(".")[0] in _SHARED:
            if key == "profiler":
                names = ",".join(dict.fromkeys(value.partition("=")[2] for value in values))
                raise UserError(f"several profilers of one job stand in brackets: profiler=[{names}]")
            raise UserError(f"{key} is one for the whole sweep: give it a single value, or start several sweeps")


def varied_keys(jobs: Sequence[Overrides], prefix: str) -> tuple[str, ...]:
    """Return the keys below a prefix in which the jobs differ, without the prefix."""
    keys = [override_key(column[0]) for column in zip(*jobs, strict=True) if len(set(column)) > 1]
    return tuple(key.removeprefix(prefix) for key in keys if key.startswith(prefix))


def check_choices(
    request: MakeRequest, jobs: Sequence[tuple[str, ...]], said: Callable[[float], None] = lambda share: None
) -> None:
    """Raise UserError for a value that is impossible in all combinations, before anything is started.

    One combination is composed for each value of each choice, not the whole product. If that one is impossible, others
    with the same value are tried. Hydra's errors (an unknown key or option) pass through. `said` is called with the
    share of the choices that are checked.
    """
    axes = [list(dict.fromkeys(column)) for column in zip(*jobs, strict=True)]
    first = [axis[0] for axis in axes]
    done, total = 0, sum(map(len, axes))
    for position, axis in enumerate(axes):
        for value in axis:
            done += 1
            said(done / total)
            made = request((*first[:position], value, *first[position + 1 :]))
            if not isinstance(made, UserError):
                continue
            others = itertools.product(*axes[:position], [value], *axes[position + 1 :])
            if all(isinstance(request(other), UserError) for other in itertools.islice(others, _TRIES)):
                raise made
