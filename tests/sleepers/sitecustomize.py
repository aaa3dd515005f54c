"""In this folder on PYTHONPATH every process sees FAKE_GPUS GPUs, and jobs sleep instead of being measured."""

import os

from attn_exp.core.host import nvml
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.execution import worker_process
from attn_exp.sweep import board


def fakes() -> list[GpuInfo]:
    return [GpuInfo(index, "Sleeper", f"GPU-fake-{index}") for index in range(int(os.environ["FAKE_GPUS"]))]


nvml.list_gpus = fakes
worker_process.WORKER = "sleeper"
# Tasks find a killed parent so long after its last heartbeat.
board.GONE_S = 6.0
