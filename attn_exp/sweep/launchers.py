"""Launchers: where a sweep's jobs run (`hydra/launcher`). Their engines are imported when they start."""

from collections.abc import Mapping
from typing import Any

from attn_exp.core.errors import UserError, nearest
from attn_exp.core.nvml import GpuInfo
from attn_exp.sweep.launcher import Launcher

__all__ = ["NAMES", "Launcher", "make_launcher"]

NAMES = ("local_gpus", "slurm", "ray")


def make_launcher(node: Mapping[str, Any], device: str, isolation: str, gpus: list[GpuInfo]) -> Launcher | None:
    """Return the launcher that is chosen, or None for Hydra's basic launcher, which is this process.

    Args:
        node: `hydra.launcher`, resolved.
        device: `device` as typed.
        isolation: `isolation.name`.
        gpus: the GPUs of this host.

    Raises:
        UserError: there is no such launcher, its engine is not installed, or it cannot run these jobs.
    """
    name = node.get("name")
    if name is None and str(node.get("_target_")).endswith(".BasicLauncher"):
        return None
    if name not in NAMES:
        typed = name or node.get("_target_")
        near = nearest(str(typed), NAMES)
        raise UserError(
            f"launcher {typed} is none of {', '.join(NAMES)}: {near}choose one, or leave hydra/launcher out"
        )
    if isolation == "none":
        raise UserError(f"isolation=none measures in this process: leave hydra/launcher={name} or isolation=none out")
    if name == "local_gpus":
        from attn_exp.sweep.local_gpus import LocalGpus

        return LocalGpus(device, gpus)
    if name == "slurm":
        from attn_exp.sweep.slurm import Slurm

        return Slurm(dict(node), device)
    from attn_exp.sweep.ray import Ray

    return Ray(dict(node), device)
