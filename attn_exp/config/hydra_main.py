"""Hydra's command line, as `hydra.main` reads it, except that mistakes are raised as `UserError`.

`hydra.main` prints mistakes with a page of usage or a traceback and exits with code 1. The environment variable
HYDRA_FULL_ERROR prevents that, but child processes would inherit it. This module therefore reads the flags with Hydra's
parser and calls its `Hydra` object, as `hydra._internal.utils._run_hydra` of Hydra 1.3 does.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NoReturn

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode, TaskFunction

from attn_exp.config.check import explain_error, is_of_composing
from attn_exp.config.compose import prepare_hydra
from attn_exp.config.overrides import override_key
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError, no_config_dir

# Keys of folders that Hydra would write to, or change to, and that are no sweep's.
_PLACES = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.chdir"),
    *("hydra.runtime.output_dir", "hydra.runtime.cwd"),
)


def hydra_main(arguments: Sequence[str], task: TaskFunction, sweep: str) -> None:
    """Do what the arguments ask for: call `task` once, sweep over it, or print help, a configuration or completions.

    `sweep` is the sweep's name unless the arguments have one. Raises UserError for a mistake in the arguments or in a
    configuration, in one sentence.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    given = parser.parse_args(list(arguments))
    _check(given)
    try:
        version.setbase("1.3")
        prepare_hydra(sweep, given.overrides)
        hydra = Hydra.create_main_hydra2(task_name="attn_exp", config_search_path=_search_path(given))
        try:
            _do(hydra, parser, given, task)
        finally:
            GlobalHydra.instance().clear()
    except Exception as error:
        if not is_of_composing(error):
            raise
        raise UserError(explain_error(error)) from error


def _refuse(message: str) -> NoReturn:
    if match := re.search(r"unrecognized arguments: --(\w[\w.-]*)", message):
        raise UserError(f"there is no flag --{match[1]}: choices have no dashes, write {match[1]}=VALUE")
    raise UserError(f"{message}; flags go before the choices, and python -m attn_exp --hydra-help lists them")


def _check(given: argparse.Namespace) -> None:
    """Raise UserError for overrides that make Hydra fail later."""
    bare = [text for text in given.overrides if re.fullmatch(r"[\w.-]+,?", text)]
    typed = next((text for text, after in pairwise(given.overrides) if "=" in text and after in bare), None)
    if typed is not None:
        after = given.overrides[given.overrides.index(typed) + 1 :]
        several = ",".join(text.rstrip(",") for text in [typed, *takewhile(bare.__contains__, after)])
        raise UserError(f"several values have commas between them and no spaces: python -m attn_exp -m {several}")
    for text in given.overrides:
        if text.lstrip("+~").startswith("="):
            # Hydra's grammar accepts this, and an assertion fails later.
            raise UserError(f"'{text}' is not of the form key=value, for example backend=flash or batch=1,8,16")
        if (key := override_key(text)) in _PLACES:
            raise UserError(
                f"{key} cannot be set: a sweep writes into its folder, folder=multirun/NAME, and nowhere else"
            )


def _search_path(given: argparse.Namespace) -> ConfigSearchPath:
    """Return where Hydra searches for configurations. Raises UserError if `--config-dir` names no folder."""
    path = create_config_search_path(given.config_path or str(conf_folder()))
    if given.config_dir is not None:
        own = Path(given.config_dir).absolute()
        if not own.is_dir():
            raise UserError(no_config_dir(str(own)))
        path.prepend(provider="command-line", path=f"file://{own}", anchor=SearchPathQuery(provider="schema"))
    return path


def _options_of_jobs(given: argparse.Namespace) -> list[str]:
    """Return the overrides as Hydra writes them: `backend=all`, `experiment=NAME`, and options of several backends.

    Hydra applies a single value to the configuration that all jobs share, whose backend may not have the option.
    """
    typed = ["backend=glob(*)" if word in ("backend=all", "backend=*") else word for word in given.overrides]
    typed = [f"+{word}" if word.startswith("experiment=") else word for word in typed]
    several = any(word.startswith("backend=") and ("," in word or "(" in word) for word in typed)
    if not (given.multirun and several):
        return typed
    parsed = zip(typed, OverridesParser.create().parse_overrides(typed), strict=True)
    return [
        word.replace("=", "=choice(", 1) + ")" if word.startswith("backend.") and not one.is_sweep_override() else word
        for word, one in parsed
    ]


def _do(hydra: Hydra, parser: argparse.ArgumentParser, given: argparse.Namespace, task: TaskFunction) -> None:
    name, overrides = given.config_name or "config", _options_of_jobs(given)
    if given.help:
        hydra.app_help(config_name=name, args_parser=parser, args=given)
    elif given.hydra_help:
        hydra.hydra_help(config_name=name, args_parser=parser, args=given)
    elif given.cfg:
        hydra.show_cfg(name, overrides, given.cfg, given.package, given.resolve)
    elif given.shell_completion:
        hydra.shell_completion(config_name=name, overrides=overrides)
    elif given.info:
        hydra.show_info(given.info, config_name=name, overrides=overrides)
    else:
        # A stored sweep (+experiment=) may set the mode, and -m overrides it. To ask for it, all is composed once more,
        # but not where only our own files are: none of these sets it.
        elsewhere = given.config_name or given.config_path or given.config_dir
        other = elsewhere or any(word.startswith(("+", "hydra")) for word in overrides)
        mode = hydra.get_mode(config_name=name, overrides=overrides) if other and not given.multirun else None
        multirun = given.multirun or mode == RunMode.MULTIRUN
        if mode != (RunMode.MULTIRUN if multirun else RunMode.RUN):
            overrides = [*overrides, f"hydra.mode={'MULTIRUN' if multirun else 'RUN'}"]
        run: Callable[..., object] = hydra.multirun if multirun else hydra.run
        run(config_name=name, task_function=task, overrides=overrides)
