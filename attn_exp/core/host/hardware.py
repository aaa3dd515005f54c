"""Datasheet peaks by device name: no measured rate can be higher."""

import re
from dataclasses import dataclass

from attn_exp.core.case.case import E4M3, INT8


@dataclass(frozen=True)
class Peak:
    """A chip's datasheet figures: dense FLOP/s by input dtype (no sparsity), memory bytes/s, and their source.

    `flops` lacks a dtype that the matrix units do not take. float32 is the rate of the CUDA cores; `flops_limit` also
    allows the TF32 matrix units, which a float32 kernel may use.
    """

    name: str
    flops: dict[str, float]
    tf32_flops: float
    bytes_per_s: float
    source: str

    def flops_limit(self, dtype: str) -> float | None:
        """Return the FLOP/s above which a figure for inputs of `dtype` is impossible.

        None if the datasheet has none.
        """
        return max(self.flops[dtype], self.tf32_flops) if dtype == "float32" else self.flops.get(dtype)


def _peak(
    name: str, half: float, single: float, tf32: float, tb_per_s: float, source: str, fp8: float | None = None
) -> Peak:
    flops = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    # Datasheets of chips with fp8 have the same rate for int8; those of A100 have twice that of half precision.
    flops[INT8] = 1e12 * (2 * half if fp8 is None else fp8)
    if fp8 is not None:
        flops[E4M3] = fp8 * 1e12
    return Peak(name, flops, tf32 * 1e12, tb_per_s * 1e12, source)


# The first match wins, so more specific names come first. The names are the driver's. Datasheets state the tensor
# cores' rates with sparsity, twice the dense rates here: an H200's 3,958 TFLOPS of FP8 are 1,979.
_PEAKS = (
    (r"\bB200\b", _peak("B200", 2250, 75, 1125, 8.0, "NVIDIA HGX B200 datasheet", 4500)),
    (r"\bGH200 144G\b", _peak("GH200 144 GB", 989.4, 67, 494.7, 4.9, "NVIDIA GH200 datasheet, 144 GB HBM3e", 1979)),
    (r"\bGH200\b", _peak("GH200", 989.4, 67, 494.7, 4.0, "NVIDIA GH200 datasheet, 96 GB HBM3", 1979)),
    (r"\bH200 NVL\b", _peak("H200 NVL", 835.5, 60, 417.5, 4.8, "NVIDIA H200 datasheet", 1671)),
    (r"\bH200\b", _peak("H200 SXM", 989.4, 67, 494.7, 4.8, "NVIDIA H200 datasheet", 1979)),
    (r"\bH100 NVL\b", _peak("H100 NVL", 835.5, 60, 417.5, 3.9, "NVIDIA H100 datasheet", 1671)),
    (r"\bH100 PCIe\b", _peak("H100 PCIe", 756, 51, 378, 2.0, "NVIDIA H100 datasheet", 1513)),
    (r"\bH100\b", _peak("H100 SXM", 989.4, 67, 494.7, 3.35, "NVIDIA H100 datasheet", 1979)),
    (r"\bA100\b.*80GB", _peak("A100 80GB", 312, 19.5, 156, 2.039, "NVIDIA A100 datasheet")),
    (r"\bA100\b.*64GB", _peak("A100 64GB", 312, 19.5, 156, 1.64, "Leonardo supercomputer, arXiv:2307.16885")),
    (r"\bA100\b", _peak("A100 40GB", 312, 19.5, 156, 1.555, "NVIDIA A100 datasheet")),
    (r"\bL40S\b", _peak("L40S", 362, 91.6, 183, 0.864, "NVIDIA L40S datasheet", 733)),
    (r"\bL4\b", _peak("L4", 121, 30.3, 60, 0.3, "NVIDIA L4 datasheet", 242.5)),
)


def datasheet_peak(device_name: str) -> Peak | None:
    """Return the peak of a device by the driver's name (`NVIDIA H200`), or None for an unknown device."""
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_name)), None)
