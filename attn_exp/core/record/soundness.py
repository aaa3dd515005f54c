"""Checks of a decoded record beyond its types, so that everything that reads records can rely on it.

Decoding checks the types; this module checks that values fit together. Readers then take a record as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

# Beyond it, ratios and products of a few numbers are no numbers any more. Nothing that is measured comes near.
_LARGEST = 1e100
_ROUNDED = 1 + 1e-9

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Number = Annotated[float, Meta(ge=0, le=_LARGEST)]
# `0-3,8`; six digits, since what reads it lists the numbers.
_Numbers = Annotated[str, Meta(pattern=r"^(\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?){0,999})?$")]


class Facts(msgspec.Struct, gc=False):
    """The entries of `environment` that are read, with their types. None and an absent entry are unknown."""

    host: str | None = None
    platform: str | None = None
    python: str | None = None
    cpu: str | None = None
    cpu_threads: _Count | None = None
    cpu_capability: str | None = None
    cpu_instruction_sets: str | None = None
    cpu_affinity: _Numbers | None = None
    cpu_governor: str | None = None
    numa_nodes: _Numbers | None = None
    matmul_precision: str | None = None
    versions: dict[str, str] = {}
    variables: dict[str, str] = {}
    git_commit: str | None = None
    tree: str | None = None
    measuring: str | None = None
    gpu: str | None = None
    gpu_uuid: str | None = None
    gpu_memory_bytes: _Count | None = None
    gpu_numa_node: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    multiprocessors: _Count | None = None
    l2_bytes: _Count | None = None
    compute_capability: str | None = None
    cuda: str | None = None
    cudnn: _Count | str | None = None
    driver: str | None = None
    power_limit_w: _Number | None = None
    max_sm_clock_mhz: _Number | None = None
    max_memory_clock_mhz: _Number | None = None
    event_floor_us: _Number | None = None
    event_quantum_us: _Number | None = None
    ecc: bool | None = None
    mig: bool | None = None
    matmul_tf32: bool | None = None
    cudnn_tf32: bool | None = None
    bf16_reduced_precision_reduction: bool | None = None
    fp16_reduced_precision_reduction: bool | None = None
    gradients_enabled: bool | None = None
    changed_settings: dict[str, str] = {}
    inputs: str | None = None
    nvml: str | None = None


def check_environment(environment: Mapping[str, Any]) -> None:
    """Check the environment of a record. Raises msgspec.ValidationError with the entry and what it should be."""
    msgspec.convert(environment, Facts)


def odd_times(passes: Sequence[str], metrics: Mapping[str, float], *, ok: bool) -> str | None:
    """Return why a record's times cannot be divided by and compared, or None."""
    for name, value in metrics.items():
        # Readers divide by these values, or take their logarithm.
        if not (value > 0 if name.endswith("/time_us") else value >= -_LARGEST) or value > _LARGEST:
            return f"metrics.{name}={value:g} is no possible value"
    for name in passes if ok else ():
        time = metrics.get(f"{name}/time_us")
        if time is None:
            return f"it is ok without a time of {name}"
        low, high = (metrics.get(f"{name}/time_{bound}_us", time) for bound in ("low", "high"))
        if not 0 < low <= time * _ROUNDED or not time <= high * _ROUNDED:
            return f"{name}/time_us={time:g} is outside of its own interval, {low:g} to {high:g}"
    return None
