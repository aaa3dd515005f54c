"""Plain: what a composed configuration says, as dictionaries of plain values."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attn_exp.errors import UserError
from attn_exp.keys import check_keys


def plain(config: DictConfig) -> dict[str, Any]:
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


def isolation_options(options: dict[str, Any]) -> dict[str, Any]:
    """How jobs are isolated, and how long each profiler may take, of a whole configuration."""
    return {**options["isolation"], "profiler_timeout_s": options["profiler_timeout_s"]}
