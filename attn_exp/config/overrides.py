"""Overrides as typed: the questions that must be answered before Hydra, which is slow to import, reads them."""

import contextlib
from collections.abc import Iterator, Sequence

from attn_exp.core.host.nvml import visible_gpus


def override_key(argument: str) -> str:
    """Return the key that an override sets, adds or deletes: `batch` for `batch=8`, `+batch=8` and `~batch`."""
    return argument.partition("=")[0].lstrip("+~")


def overridden(arguments: Sequence[str], *keys: str) -> bool:
    """Return whether any of the arguments is an override of one of these keys."""
    return any(override_key(argument) in keys for argument in arguments)


def no_gpu(overrides: Sequence[str]) -> bool:
    """Whether the defaults are those of a host without a GPU. A launcher's jobs run on other hosts."""
    return not overridden(overrides, "hydra/launcher") and not visible_gpus()


@contextlib.contextmanager
def hydra_aside() -> Iterator[None]:
    """Let Hydra be started inside the block, as in a process that has none yet."""
    # This module is imported for each --help.
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.version import VersionBase

    running, configuration, version = GlobalHydra.instance(), HydraConfig.instance(), VersionBase.instance()
    hydra, config, base = running.hydra, configuration.cfg, version.version_base
    running.hydra, configuration.cfg = None, None
    try:
        yield
    finally:
        running.hydra, configuration.cfg, version.version_base = hydra, config, base
