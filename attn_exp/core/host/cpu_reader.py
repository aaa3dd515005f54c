"""Frequency of the processor, and whether heat lowered it, as far as Linux shows them (cpufreq).

They are read in the worker, between blocks: that takes microseconds, and a second process would take processor time
from what is timed.
"""

import time
from collections.abc import Collection, Iterable
from pathlib import Path

from attn_exp.core.host.energy import Reading, moment

# Frequencies are read of so many processors at most.
_CPUS = 8
_CPU = "sys/devices/system/cpu"
# The reason of a reading since whose predecessor a processor's temperature lowered its clock.
THROTTLED = "cpu_throttled"


class CpuReader:
    """Readings of the processor between `begin` and `end`, one at each call of `look`.

    `cpus` are the processors that this process may run on, `root` is the root of the file system.
    """

    source = "linux"

    def __init__(self, cpus: Collection[int], root: Path = Path("/")) -> None:
        chosen = sorted(cpus)[:_CPUS]
        self._clocks = _readable(root / _CPU / f"cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in chosen)
        self._throttles = _readable(root / _CPU / f"cpu{cpu}/thermal_throttle/package_throttle_count" for cpu in chosen)
        self._readings: list[Reading] = []
        self._throttled = -1.0

    @property
    def shows(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._clocks)

    def start(self) -> None:
        """Do nothing: there is nothing to open."""

    def begin(self) -> None:
        """Forget earlier readings and take the first one."""
        self._readings = []
        self._throttled = self._throttle_count()
        self.look()

    def look(self) -> None:
        """Take a reading."""
        clocks = [khz / 1e3 for path in self._clocks if (khz := _number(path)) is not None]
        count, at = self._throttle_count(), moment(time.perf_counter())
        reasons = (THROTTLED,) if count > self._throttled >= 0 else ()
        self._throttled = count
        self._readings.append(Reading(at=at, clock_mhz=sum(clocks) / len(clocks) if clocks else None, reasons=reasons))

    def end(self) -> tuple[list[Reading], str]:
        """Return the readings since `begin`, and what went wrong with them, empty if nothing did."""
        if any(reading.clock_mhz is None for reading in self._readings):
            return self._readings, "the processor's frequency can no longer be read"
        return self._readings, ""

    def _throttle_count(self) -> float:
        return sum(count for path in self._throttles if (count := _number(path)) is not None)


def _readable(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if _number(path) is not None]


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
