"""Compose: configurations for the commands that are not Hydra applications themselves."""

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attn_exp.config.check import check_keys
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError, no_config_dir


def resolved_config(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as a resolved dictionary, without Hydra's node.

    Raises:
        UserError: an interpolation that leads nowhere, or a key that nothing reads.
    """
    names = [str(name) for name in config if name != "hydra"]
    # A masked copy takes longer than all the rest.
    own = OmegaConf.masked_copy(config, names) if "hydra" in config else config
    written = OmegaConf.to_container(own, resolve=False)
    assert isinstance(written, dict)
    check_keys({str(name): value for name, value in written.items()})
    try:
        found = OmegaConf.to_container(own, resolve=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{key}{str(error).splitlines()[0]}") from error
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def is_dry_run(config: DictConfig) -> bool:
    """Whether to list the jobs only. Raises UserError for anything but true and false: it must not start by a typo."""
    if not isinstance(config.dry_run, bool):
        raise UserError(f"dry_run={config.dry_run} is neither true nor false")
    return config.dry_run


def isolation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """How jobs are isolated, and how long each profiler may take, of a whole configuration."""
    return {**options["isolation"], "profiler_timeout_s": options["profiler_timeout_s"]}


_FLAGS = ("--config-dir", "-cd")


def split_config_dir(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The other arguments, and the folder of one's own choices that `--config-dir FOLDER` names, as Hydra takes it.

    Raises:
        UserError: no folder, or one that is not there.
    """
    rest: list[str] = []
    folder: str | None = None
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in _FLAGS:
            folder = value if equals else next(words, "")
        else:
            rest.append(word)
    if folder is None:
        return rest, None
    if not folder or not Path(folder).is_dir():
        raise UserError(no_config_dir(folder or "''"))
    return rest, Path(folder).absolute()


def new_sweep_name(prefix: str = "") -> str:
    """Return a name for a sweep that was given none: the time, and a random part for sweeps that start together."""
    return f"{prefix}{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(2)}"


def prepare_hydra(sweep: str) -> None:
    """Tell Hydra what `config.yaml` refers to: `${default_sweep:}`, the sweep's name unless the user names it."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    OmegaConf.register_new_resolver("default_sweep", lambda: sweep, replace=True)
    # hydra-ray-launcher, if it is installed, has a schema of this name that Hydra would hold against our file. Plugins
    # store their schemas when they are first looked for.
    Plugins.instance()
    ConfigStore.instance().repo["hydra"].get("launcher", {}).pop("ray.yaml", None)


def compose_config(overrides: Sequence[str], sweep: str, own: Path | None = None) -> DictConfig:
    """The configuration that `python -m attn_exp` would have with these overrides, in a sweep of this name.

    `own` is the folder that `--config-dir` would name.

    Raises:
        UserError: what Hydra says of a mistake, in one sentence.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    from attn_exp.config.check import explain_error

    prepare_hydra(sweep)
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            return compose("config", [*_searched(own), *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain_error(error)) from error


def _searched(own: Path | None) -> list[str]:
    quoted = "" if own is None else str(own).replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"] if quoted else []
