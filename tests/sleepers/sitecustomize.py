"""In this folder on PYTHONPATH every process sees FAKE_GPUS GPUs, and jobs sleep instead of being measured."""

import os

import attn_exp.run.gpus
import attn_exp.run.worker_process
from attn_exp.core.nvml import GpuInfo


def gpus() -> list[GpuInfo]:
    return [GpuInfo(index, "Sleeper", f"GPU-fake-{index}") for index in range(int(os.environ["FAKE_GPUS"]))]


attn_exp.run.gpus.list_gpus = gpus
attn_exp.run.worker_process.WORKER = "sleeper"
