"""Compose: configurations for the commands that are not Hydra applications themselves."""

import os
from collections.abc import Sequence

from omegaconf import DictConfig

from attn_exp.conf import conf_folder
from attn_exp.errors import UserError


def compose_config(overrides: Sequence[str], sweep: str) -> DictConfig:
    """The configuration that `python -m attn_exp` would have with these overrides, in a sweep of this name.

    Raises:
        UserError: what Hydra says of a mistake, in one sentence.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from attn_exp.mistakes import sentence
    from attn_exp.sweeper import register

    register()
    os.environ["ATTN_EXP_SWEEP"] = sweep
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            return compose("config", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error)) from error
