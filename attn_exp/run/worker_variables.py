"""The environment variables that a worker gets."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from attn_exp.core.errors import UserError
from attn_exp.core.redaction import is_secret

_NAMES = (
    *("PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "COLUMNS"),
    *("TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_STATE_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "CC", "CXX"),
)
# Grouped by reader: CUDA and its tools, torch and its compilers, kernel packages, CPU libraries, Python.
_PREFIXES = (
    *("CUDA", "CUDNN", "CUBLAS", "CUTLASS_", "CUTE_", "NVIDIA_", "NV_", "NVTX_", "NVTE_", "NCCL_", "NSYS_", "KINETO_"),
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "HELION_", "XFORMERS_", "FLASH_ATTENTION_", "FLASH_ATTN_"),
    *("OMP_", "GOMP_", "KMP_", "MKL", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "ASAN_", "LC_", "PYTHON"),
    "ATTN_EXP",
)
_PATTERN = re.compile(r"[A-Za-z_*?][A-Za-z0-9_*?]*")


def worker_variables(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a worker gets: those that computing needs, and those that `more` names.

    A needed variable whose name sounds like a secret is left out, unless `more` names it.

    Args:
        environ: the environment.
        more: names and patterns, in which `*` is any text.
    """
    return {name: value for name, value in environ.items() if _needed(name) or _named(name, more)}


def check_patterns(given: Any) -> tuple[str, ...]:
    """Return the names and patterns of `isolation.variables`. Raises UserError for one that cannot name a variable."""
    names = [given] if isinstance(given, str) else given or []
    for name in names if isinstance(names, (list, tuple)) else [names]:
        if not isinstance(name, str) or not _PATTERN.fullmatch(name):
            raise UserError(f"isolation.variables={name} names no variable: write isolation.variables=[MY_NAME,HF_*]")
    return tuple(names)


def _needed(name: str) -> bool:
    return (name in _NAMES or name.startswith(_PREFIXES)) and not is_secret(name)


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
