"""Use Hydra inside a program that may use Hydra itself: its state is put aside, and put back."""

import contextlib
from collections.abc import Iterator

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase


@contextlib.contextmanager
def hydra_aside() -> Iterator[None]:
    """Let Hydra be started inside the block, as in a process that has none yet."""
    running, configuration, version = GlobalHydra.instance(), HydraConfig.instance(), VersionBase.instance()
    hydra, config, base = running.hydra, configuration.cfg, version.version_base
    running.hydra, configuration.cfg = None, None
    try:
        yield
    finally:
        running.hydra, configuration.cfg, version.version_base = hydra, config, base
