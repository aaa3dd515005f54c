"""A stand-in for NVML in the process that reads it: a GPU whose counters follow the clock.

`FAKE_NVML` chooses what goes wrong, and when: `hangs=0.3` after so many seconds, `dies=0.3`, `back=0.3` (the counter
goes back), `none` (no driver), `slow=0.016` (each answer takes so long).
"""

import os
import time
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_SUCCESS, NVML_FI_DEV_POWER_INSTANT = 1, 2, 0, 0, 186
POWER_W, STEP_S, CLOCK_MHZ, MEMORY_MHZ = 600.0, 0.02, 1700, 3201
_how, _, _when = os.environ.get("FAKE_NVML", "").partition("=")
_asked: list[float] = []


class NVMLError(Exception):
    """As NVML's."""


def _now() -> float:
    """Seconds since the first question, after what is to go wrong went wrong."""
    _asked[:1] = _asked[:1] or [time.perf_counter()]
    if _how == "slow":
        time.sleep(float(_when))
    since = time.perf_counter() - _asked[0]
    if _how == "hangs" and since > float(_when):
        time.sleep(3600)
    if _how == "dies" and since > float(_when):
        os._exit(1)
    return since


def nvmlInit() -> None:
    if _how == "none":
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    return uuid


def nvmlDeviceGetTotalEnergyConsumption(handle: str) -> int:
    since = _now() // STEP_S * STEP_S
    millijoules = round(1e3 * POWER_W * since)
    return 0 if _how == "back" and since > float(_when) else 10**9 + millijoules


def nvmlDeviceGetClockInfo(handle: str, kind: int) -> int:
    _now()
    return CLOCK_MHZ if kind == NVML_CLOCK_SM else MEMORY_MHZ


def nvmlDeviceGetTemperature(handle: str, kind: int) -> int:
    return 61


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: str) -> int:
    return 0x4


def nvmlDeviceGetFieldValues(handle: str, fields: list[int]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(fieldId=one, nvmlReturn=NVML_SUCCESS, value=SimpleNamespace(uiVal=590_000)) for one in fields
    ]
