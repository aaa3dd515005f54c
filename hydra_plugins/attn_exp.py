"""The Hydra plugin behind `hydra/sweeper=attn_exp`.

Every Hydra program in the environment imports all modules of the namespace package `hydra_plugins`, so this one imports
nothing but Hydra. The sweep itself is in `attn_exp/sweep/sweeper.py`.
"""

from collections.abc import Mapping
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ProductSweeper(Sweeper):
    """Run the product of all choices, in this process or in the tasks of a launcher.

    Args:
        params: choices that a stored sweep makes; the command line overrides them.
    """

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what `sweep` needs."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """Run every combination of the choices in `arguments` and `params`."""
        from attn_exp.sweep.sweeper import run_sweep

        assert self.config is not None and self.hydra_context is not None and self.task_function is not None
        params = [f"{key}={value}" for key, value in self.params.items()]
        run_sweep(self.hydra_context, self.task_function, self.config, [*params, *arguments])
