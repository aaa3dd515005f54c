"""The environment of a record: names, versions and settings that a number depends on."""

import os
import platform
import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

import torch

from attn_exp.core.catalogue import packages
from attn_exp.core.host.cpu import allowed_cpus, cpu_name, governor, instruction_sets, numa_nodes, ranges
from attn_exp.core.provenance import git_commit, measuring, tree
from attn_exp.core.redaction import is_secret, redacted

# Recorded if they are set. No other variable enters a record; of Triton's, those that change kernels (triton/knobs.py).
_VARIABLES = re.compile(
    r"^(CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER)"
    r"|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|CUDNN_[A-Z_]*|TORCH_CUDNN_[A-Z_0-9]*|TORCH_ALLOW_TF32[A-Z_]*"
    r"|TRITON_(ALWAYS_COMPILE|CACHE_AUTOTUNING|CACHE_DIR|DEBUG|DEFAULT_FP_FUSION|DISABLE_LINE_INFO|ENABLE_(ASAN|NVTX)"
    r"|F32_DEFAULT|FRONT_END_DEBUGGING|INSTRUMENTATION_MODE|INTERPRET|KERNEL_(DUMP|OVERRIDE)|MOCK_PTX_VERSION"
    r"|OVERRIDE_(ARCH|DIR)|PTXAS_(BLACKWELL_|)PATH|STORE_BINARY_ONLY)"
    r"|PYTORCH_(CUDA_|)ALLOC_CONF|OMP_NUM_THREADS|MKL_NUM_THREADS|ATEN_CPU_CAPABILITY)$"
)
# These are null where there is none; other facts that cannot be known are absent.
_KNOWN_WITHOUT = ("git_commit", "cudnn")
# Recorded for every backend; conf/backend names the backends' own.
_PACKAGES = ("attn_exp", "torch", "triton", "numpy")


def environment(device: str) -> dict[str, Any]:
    """Return the names, versions and settings that a number depends on; flat and JSON-ready."""
    cpus = allowed_cpus()
    facts: dict[str, Any] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_instruction_sets": instruction_sets(),
        "cpu_affinity": ranges(cpus),
        "cpu_governor": governor(cpus),
        "numa_nodes": numa_nodes(cpus),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "versions": versions((*_PACKAGES, *packages())),
        "variables": {
            name: redacted(value)
            for name, value in sorted(os.environ.items())
            if _VARIABLES.match(name) and not is_secret(name)
        },
        "git_commit": git_commit(),
        "tree": tree(),
        "measuring": measuring(),
    }
    if device == "cuda":
        matmul = torch.backends.cuda.matmul
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {
            "gpu": properties.name,
            "gpu_uuid": f"GPU-{properties.uuid}",
            "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "matmul_tf32": matmul.fp32_precision == "tf32",
            "cudnn_tf32": torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
            "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        }
    return {name: value for name, value in facts.items() if value is not None or name in _KNOWN_WITHOUT}


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    return {name: version for name in distributions if (version := _version(name))}


def _version(package: str) -> str | None:
    loaded = sys.modules.get(package)
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None
