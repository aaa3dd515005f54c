"""Combinations: the jobs that a sweep's choices make, composed as Hydra would compose them, and checked beforehand.

It stands on private parts of Hydra 1.3 (`ConfigLoaderImpl._apply_overrides_to_config`, `load_sweep_config`); tests hold
its configurations against Hydra's.
"""

import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from attn_exp.config.overrides import override_key
from attn_exp.core.errors import UserError
from attn_exp.core.record import Request

# How many combinations are tried before a choice is called impossible in all of them.
_TRIES = 64
# What all jobs of a sweep share.
_ONCE = (
    *("sweep", "folder", "tracker", "isolation", "device", "dry_run", "save_plots"),
    *("profiler", "profiler_timeout_s"),
)
# The overrides of one job, in the order of the choices.
Overrides = Sequence[str]
# What a job's overrides ask for, or why that is impossible.
MakeRequest = Callable[[tuple[str, ...]], Request | UserError]


class _Base:
    """What a combination of group choices makes: whole, and as the part that says something about the job."""

    def __init__(self, whole: DictConfig, shared: Sequence[Override]) -> None:
        self.whole = whole
        # Hydra's node is most of it.
        self.own = copy.deepcopy(whole)
        with open_dict(self.own):
            del self.own["hydra"]
        ConfigLoaderImpl._apply_overrides_to_config(list(shared), self.own)
        written = OmegaConf.to_container(self.own, resolve=False)
        assert isinstance(written, dict)
        self._written: dict[Any, Any] = written

    def restore(self, tops: Iterable[str]) -> None:
        """Give the nodes of these names back what they were."""
        with open_dict(self.own):
            for top in tops:
                if top in self._written:
                    self.own[top] = self._written[top]
                else:
                    self.own.pop(top, None)


class Composer:
    """Composes the jobs of one sweep as Hydra would, only faster.

    A combination of group choices is composed once, and what all of `jobs` have in common is applied to it once: where
    they are given, nothing else may be composed than combinations of their choices.
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
        """The configuration of one job, `hydra` node included. Raises Hydra's own errors."""
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
        """The same without the `hydra` node, which says nothing about the job."""
        config = copy.deepcopy(self._base(overrides).own)
        ConfigLoaderImpl._apply_overrides_to_config(self._values(overrides), config)
        return config

    def request(self, overrides: Overrides) -> Request | UserError:
        """The job, or why it is impossible. Raises Hydra's own errors."""
        base, values = self._base(overrides), self._values(overrides)
        # A copy for each job would take as long as all the rest.
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
        """The plain values to apply to the base's own part."""
        parsed = [self._parsed(text) for position, text in enumerate(overrides) if position not in self._shared]
        return [override for override, composed in parsed if not composed]

    def _find_shared(self, jobs: Sequence[Overrides]) -> dict[int, Override]:
        """The plain values that all jobs have, by position, but for those of nodes that a choice changes as well."""
        columns = [[self._parsed(text) for text in dict.fromkeys(column)] for column in zip(*jobs, strict=True)]
        alone = {position: column[0] for position, column in enumerate(columns) if len(column) == 1}
        changed = {_top(override) for column in columns if len(column) > 1 for override, _ in column}
        # What adds or deletes looks at what is there, which a choice may have made: it keeps its place, and so does
        # what stands upon it.
        changed |= {_top(override) for override, _ in alone.values() if override.is_add() or override.is_delete()}
        return {
            position: override
            for position, (override, composed) in alone.items()
            if not composed and _top(override) not in changed
        }

    def _parse(self, text: str) -> tuple[Override, bool]:
        """An override, and whether Hydra has to compose it anew: as hydra/_internal/defaults_list.py decides."""
        override = self._parser.parse_overrides([text])[0]
        if not override.key_or_group:
            # Hydra's grammar lets it pass, and an assertion fails later.
            raise UserError(f"'{text}' is not of the form key=value, for example backend=flash or batch=1,8,16")
        group = self._loader.repository.group_exists(override.key_or_group)
        return override, (group and not isinstance(override.value(), dict)) or override.is_hydra_override()


def _top(override: Override) -> str:
    """The name of the topmost node that an override changes."""
    return re.split(r"[.\[@]", override.key_or_group, maxsplit=1)[0]


def check_shared(jobs: Sequence[Overrides]) -> None:
    """Raise UserError if a sweep runs over something that it has one of."""
    for values in zip(*jobs, strict=True):
        key = override_key(values[0])
        if len(set(values)) > 1 and key.split(".")[0] in _ONCE:
            if key == "profiler":
                names = ",".join(dict.fromkeys(value.partition("=")[2] for value in values))
                raise UserError(f"several profilers of one job stand in brackets: profiler=[{names}]")
            raise UserError(f"{key} is one for the whole sweep: give it a single value, or start several sweeps")


def varied_keys(jobs: Sequence[Overrides], prefix: str) -> tuple[str, ...]:
    """The keys below a prefix that the jobs have different values of, without it."""
    keys = [override_key(column[0]) for column in zip(*jobs, strict=True) if len(set(column)) > 1]
    return tuple(key.removeprefix(prefix) for key in keys if key.startswith(prefix))


def check_choices(request: MakeRequest, jobs: Sequence[tuple[str, ...]]) -> None:
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
