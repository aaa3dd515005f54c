"""Where a record was measured: hardware, software, and the variables that change either."""

import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# Kept if they are set; nothing else of the environment enters a record.
_VARIABLES = re.compile(
    r"^(CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER)"
    r"|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|CUDNN_[A-Z_]*|TORCH_CUDNN_[A-Z_0-9]*|TORCH_ALLOW_TF32[A-Z_]*"
    r"|PYTORCH_(CUDA_|)ALLOC_CONF|TRITON_[A-Z_]*|OMP_NUM_THREADS|MKL_NUM_THREADS|ATEN_CPU_CAPABILITY)$"
)
_PACKAGES = (
    *("attn_exp", "torch", "triton", "numpy"),
    *(
        "nvidia-cudnn-frontend",
        "flash-attn",
        "flash-attn-3",
        "flash-attn-4",
        "xformers",
        "transformer-engine",
        "helion",
    ),
)


def environment(device: str) -> dict[str, Any]:
    """Names, versions and settings that a number depends on; flat, JSON-ready."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "versions": {name: there for name in _PACKAGES if (there := _version(name))},
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)},
        "git_commit": git_commit(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "gpu": properties.name,
            "gpu_uuid": f"GPU-{properties.uuid}",
            "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }
    return found


@cache
def git_commit() -> str | None:
    """The commit of the checkout that the user stands in, `-dirty` behind it if it was changed; None outside of one."""
    try:
        ran = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() or None


def _version(package: str) -> str | None:
    loaded = sys.modules.get(package)
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
