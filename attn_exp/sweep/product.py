"""Compose the jobs of a sweep as Hydra would, only faster, and check its choices before anything is started.

This uses private parts of Hydra 1.3 (`ConfigLoaderImpl._apply_overrides_to_config`, `load_sweep_config`); tests compare
its configurations with Hydra's.
"""

import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict

from attn_exp.config.compose import dictionary
from attn_exp.config.overrides import override_key
from attn_exp.core.errors import UserError, first_line
from attn_exp.core.record.request import Request
from attn_exp.core.text import and_text

# How many combinations are tried before a choice is taken to be impossible in all of them.
_TRIES = 64
# Keys that a sweep has one value of.
_SHARED = (
    *("sweep", "folder", "tracker", "isolation", "device", "dry_run", "save_plots", "columns", "show", "format"),
    *("quiet", "private", "gpu_wait_s", "profiler", "profiler_timeout_s"),
)
# Choices that compute in no way of their own: other names of what others do, and what results are compared with.
NO_RIVALS = ("auto", "compiled", "priority", "reference")
# The overrides of one job, in the order of the sweep's choices.
Overrides = Sequence[str]
# Makes the request of a job from its overrides, or the reason why the job is impossible.
MakeRequest = Callable[[tuple[str, ...]], Request | UserError]


class _Base:
    """The configuration of a combination of group choices, without Hydra's node."""

    def __init__(self, whole: DictConfig, shared: Sequence[Override]) -> None:
        self.own = whole
        # Hydra's node is the largest part, and says nothing about the job.
        with open_dict(self.own):
            del self.own["hydra"]
        ConfigLoaderImpl._apply_overrides_to_config(list(shared), self.own)
        self._original = dictionary(self.own, resolve=False)

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

    Each combination of group choices is composed once, and overrides that all `jobs` share are applied to it once. If
    jobs are given, only combinations of their choices may be composed. `ask` makes a request of a configuration without
    Hydra's node, and `master` is the composed configuration without the sweep's choices.
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
        self._options = self._options_of(jobs)
        self._shared = self._find_shared(jobs)

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
            if any(whole.hydra[node] != self._master.hydra[node] for node in ("sweeper", "launcher")):
                stored = next((text for text in groups if "experiment=" in text), groups[0])
                raise UserError(
                    f"{stored} is a sweep of its own: run python -m attn_exp -m {stored} sweep=NAME, then the others "
                    "with the same sweep=NAME"
                )
            self._bases[groups] = _Base(whole, list(self._shared.values()))
        return self._bases[groups]

    def _values(self, overrides: Overrides) -> list[Override]:
        """Return the overrides of single values that the base does not have yet."""
        parsed = [
            self._parsed(text)
            for position, text in enumerate(overrides)
            if position not in self._shared and self._is_for(text, overrides)
        ]
        return [override for override, composed in parsed if not composed]

    def lacking(self, jobs: Sequence[Overrides]) -> list[str]:
        """Return a line for each option that not all chosen backends have; the others run without it."""
        options = dict.fromkeys(text.partition("=")[0] for job in jobs for text in job if _option(text))
        lines = []
        for option in options:
            without = [name for name, declared in self._options.items() if not self._is_own(option, declared)]
            if without:
                lines.append(f"{option} is no option of {and_text(without)}: they run without it")
        return lines

    def distinct(self, jobs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Return the jobs without those that differ only in options that their backend does not have."""
        distinct = {tuple(text for text in job if self._is_for(text, job)): job for job in reversed(jobs)}
        return list(distinct.values())[::-1]

    def _is_for(self, text: str, overrides: Overrides) -> bool:
        """Return whether an override of a job is for its backend."""
        options = self._options.get(chosen_backend(overrides) or "")
        return options is None or self._is_own(text, options)

    def _options_of(self, jobs: Sequence[Overrides]) -> dict[str, frozenset[str]]:
        """Return the options of each backend that a sweep chooses from several."""
        names = dict.fromkeys(chosen_backend(job) for job in jobs)
        files = {name: self._loader.repository.load_config(f"backend/{name}") for name in names if name}
        chosen = len(names) > 1 and None not in names
        return {name: frozenset(map(str, file.config)) for name, file in files.items() if chosen and file is not None}

    def _is_own(self, text: str, options: frozenset[str]) -> bool:
        """Return whether an override is for a backend with these options; one that none of them has is for all."""
        option = _option(text)
        return not option or option in options or not any(option in names for names in self._options.values())

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
        group = self._loader.repository.group_exists(override.key_or_group)
        return override, (group and not isinstance(override.value(), dict)) or override.is_hydra_override()


def chosen_backend(overrides: Overrides) -> str | None:
    """Return the choice of the group `backend` among the overrides of a job, None without one."""
    return next((text.partition("=")[2] for text in overrides if text.startswith("backend=")), None)


def _option(text: str) -> str:
    """Return the backend's option that an override sets: `order` of `backend.order=[math]`; empty for another key."""
    key = text.partition("=")[0]
    return key.split(".")[1] if key.startswith("backend.") else ""


def _top(override: Override) -> str:
    """Return the name of the top-level node that an override changes."""
    return re.split(r"[.\[@]", override.key_or_group, maxsplit=1)[0]


def of_every_backend(overrides: Sequence[Override]) -> bool:
    """Whether a sweep is of every backend: backend=glob(*)."""
    chosen = [override.value() for override in overrides if override.key_or_group == "backend"][-1:]
    return bool(chosen) and isinstance(chosen[0], Glob) and chosen[0].include == ["*"]


def combinations(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """Return the overrides of each combination of values, each once: of batch=1,1 there is one."""
    return list(dict.fromkeys(map(tuple, BasicSweeper.split_arguments(list(overrides), None)[0])))


# Keys that say who computes a case, and groups and keys below them.
_OF_RIVALS = ("backend", "compile", "caches", "deterministic")


def without_rivals(job: Overrides) -> tuple[str, ...]:
    """Return the overrides of a job that do not say who computes."""
    return tuple(text for text in job if re.split(r"[.@=]", text.lstrip("+~"), maxsplit=1)[0] not in _OF_RIVALS)


def case_by_case(jobs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the jobs with those behind each other that differ in who computes, cases in the order that they had."""
    cases: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for job in jobs:
        cases.setdefault(without_rivals(job), []).append(job)
    return [job for rivals in cases.values() for job in rivals]


def parsed_combinations(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the words of each combination of values (`batch=1,8`). Raises UserError for what Hydra cannot read."""
    try:
        return combinations(OverridesParser.create().parse_overrides(list(words)))
    except HydraException as error:
        raise UserError(f"{first_line(error)}: write KEY=VALUE,VALUE or KEY=range(FROM,TO,STEP)") from error


def check_shared(jobs: Sequence[Overrides], written: Mapping[Any, Any]) -> None:
    """Raise UserError if a sweep has several values of a key in `_SHARED`, also by what `written` interpolates."""
    varied = {override_key(column[0]) for column in zip(*jobs, strict=True) if len(set(column)) > 1}
    for key in _SHARED:
        inside = {name for name in varied if name.split(".")[0] == key}
        named = re.findall(r"\$\{([\w.]+)\}", str(written.get(key)))
        if inside or any(name in varied or name.split(".")[0] in varied for name in named):
            typed = next(iter(inside), f"{key}={written.get(key)}")
            values = dict.fromkeys(
                text.partition("=")[2] for job in jobs for text in job if override_key(text) == typed
            )
            how = f"write profiler=[{','.join(values)}]" if key == "profiler" else "give it a single value"
            raise UserError(f"{typed} is one for the whole sweep: {how}, or start several sweeps")


def varied_keys(jobs: Sequence[Overrides], prefix: str) -> tuple[str, ...]:
    """Return the keys below a prefix in which the jobs differ, without the prefix."""
    keys = [override_key(column[0]) for column in zip(*jobs, strict=True) if len(set(column)) > 1]
    return tuple(key.removeprefix(prefix) for key in keys if key.startswith(prefix))


def check_choices(
    request: MakeRequest, jobs: Sequence[tuple[str, ...]], told: Callable[[float], None] = lambda share: None
) -> None:
    """Raise UserError for a value that is impossible in all combinations, before anything is started.

    One combination is composed for each value of each choice, not the whole product. If that one is impossible, others
    with the same value are tried. Hydra's errors (an unknown key or option) pass through.
    """
    axes = [list(dict.fromkeys(column)) for column in zip(*jobs, strict=True)]
    first = [axis[0] for axis in axes]
    done, total = 0, sum(map(len, axes))
    for position, axis in enumerate(axes):
        for value in axis:
            done += 1
            told(done / total)
            made = request((*first[:position], value, *first[position + 1 :]))
            if not isinstance(made, UserError):
                continue
            rest = itertools.product(*axes[:position], [value], *axes[position + 1 :])
            if all(isinstance(request(job), UserError) for job in itertools.islice(rest, _TRIES)):
                raise made
