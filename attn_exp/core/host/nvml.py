"""NVML: which GPUs there are and their state. It needs no torch, so the parent can use it too."""

import os
import time
from dataclasses import dataclass
from typing import Any

import pynvml

from attn_exp.core.host.cpu import numa_node_of_device

# NVML_FI_DEV_PERF_POLICY_*: nanoseconds for which the clock was reduced, by cause (nvml.h).
_HELD_BACK = {74: "power", 75: "thermal", 77: "board_limit", 79: "reliability"}

# Bits of the clocks event reason mask (nvml.h, nvmlClocksEventReason*).
REASONS = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}


@dataclass(frozen=True)
class GpuInfo:
    """One GPU as the driver lists it, before CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    uuid: str


def list_gpus() -> list[GpuInfo]:
    """Return the NVIDIA GPUs of this host; empty without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(GpuInfo(index, pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)))
        except pynvml.NVMLError:
            continue  # a lost GPU cannot be measured
    return gpus


def visible_gpus() -> list[GpuInfo]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order; all of them if it is not set."""
    gpus, visible = list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    chosen = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        match = [gpu for gpu in gpus if str(gpu.index) == entry or gpu.uuid.startswith(entry)]
        if not match:
            break  # as CUDA does: it ignores everything after an entry that does not exist
        chosen.append(match[0])
    return chosen


def used_bytes(uuid: str) -> int | None:
    """Return how much of a GPU's memory processes have taken; None where NVML does not know it."""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        # The second version leaves out what the driver keeps for itself.
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except pynvml.NVMLError:
        return None


class GpuState:
    """Reads clocks, power, temperature and throttle reasons of one GPU.

    A read takes 1 to 10 ms: never read while timing.
    """

    def __init__(self, uuid: str) -> None:
        """Open a GPU by its UUID. Raises pynvml.NVMLError if NVML does not know it."""
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def constant(self) -> dict[str, Any]:
        """Return what does not change while measuring: power limit in watts, highest clocks in MHz, driver, ECC."""
        return _answered(
            power_limit_w=lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3,
            max_sm_clock_mhz=lambda: pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
            max_memory_clock_mhz=lambda: pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_MEM),
            ecc=lambda: bool(pynvml.nvmlDeviceGetEccMode(self._handle)[0]),
            gpu_numa_node=self._numa_node,
            driver=pynvml.nvmlSystemGetDriverVersion,
            mig=lambda: bool(pynvml.nvmlDeviceGetMigMode(self._handle)[0]),
        )

    def read(self) -> dict[str, Any]:
        """Return SM clock in MHz, power in W, temperature in C, throttle reasons and processes.

        `held_back_ns` is the time at a reduced clock by cause, in nanoseconds.
        """
        return {
            "at": time.time(),
            **_answered(
                sm_clock_mhz=lambda: pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
                power_w=lambda: pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
                temperature_c=lambda: pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU),
                reasons=self._reasons,
                held_back_ns=self._held_back_ns,
                processes=lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)),
            ),
        }

    def energy(self) -> dict[str, Any]:
        """Return the driver's count of joules, with the moment of `time.perf_counter()` at which it was read."""
        counted = _answered(energy_j=lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3)
        return {"energy_at": time.perf_counter(), **counted} if counted else {}

    def now(self) -> dict[str, Any]:
        """Return what is asked for while calls are timed: clocks in MHz, power of this instant, temperature, reasons.

        `nvmlDeviceGetPowerUsage` is not asked: since Ampere it is a mean over a second (NVML API reference).
        """
        return _answered(
            clock_mhz=lambda: pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=lambda: pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_MEM),
            power_w=self._instant_power_w,
            temperature_c=lambda: pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU),
            reasons=self._reasons,
        )

    def _instant_power_w(self) -> float | None:
        (value,) = pynvml.nvmlDeviceGetFieldValues(self._handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
        return value.value.uiVal / 1e3 if value.nvmlReturn == pynvml.NVML_SUCCESS else None

    def _numa_node(self) -> int | None:
        bus_id = pynvml.nvmlDeviceGetPciInfo(self._handle).busId
        return numa_node_of_device(bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id))

    def _reasons(self) -> list[str]:
        mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return [name for bit, name in REASONS.items() if mask & bit]

    def _held_back_ns(self) -> dict[str, int]:
        values = pynvml.nvmlDeviceGetFieldValues(self._handle, list(_HELD_BACK))
        return {
            _HELD_BACK[value.fieldId]: int(value.value.ullVal)
            for value in values
            if value.nvmlReturn == pynvml.NVML_SUCCESS
        }


def _answered(**questions: Any) -> dict[str, Any]:
    """Return the answers to those questions that this GPU and driver support."""
    answers = {}
    for name, ask in questions.items():
        try:
            answers[name] = ask()
        except pynvml.NVMLError:
            continue
    return {name: answer for name, answer in answers.items() if answer is not None}
