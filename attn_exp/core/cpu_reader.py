"""Frequency and energy of the processor, as far as Linux shows them: cpufreq and RAPL.

They are read in the worker, between blocks: that takes microseconds, and a second process would take processor time
from what is timed.
"""

import time
from collections.abc import Collection, Iterable
from pathlib import Path

from attn_exp.core.energy import Reading
from attn_exp.core.moment import moment

# Frequencies are read of so many processors at most.
_CPUS = 8
_POWERCAP = "sys/class/powercap"
_CPU = "sys/devices/system/cpu"
# The reason of a reading since whose predecessor a processor's temperature lowered its clock.
THROTTLED = "cpu_throttled"


class CpuReader:
    """Readings of the processor between `begin` and `end`, one at each call of `look`.

    RAPL (Intel's and AMD's running average power limit) counts the energy of whole packages, with that of other
    programs, and of their memory where it is counted.

    Args:
        cpus: the processors that this process may run on.
        root: of the file system.
    """

    source = "linux"
    # RAPL's counters move every millisecond (Intel SDM, volume 3B, chapter on RAPL).
    late_s: float | None = 0.001

    def __init__(self, cpus: Collection[int], root: Path = Path("/")) -> None:
        chosen = sorted(cpus)[:_CPUS]
        self._clocks = _readable(root / _CPU / f"cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in chosen)
        self._throttles = _readable(root / _CPU / f"cpu{cpu}/thermal_throttle/package_throttle_count" for cpu in chosen)
        zones = sorted((root / _POWERCAP).glob("intel-rapl:*"))
        counted = [zone for zone in zones if (_text(zone / "name") or "").startswith(("package", "dram"))]
        self._energies = _readable(zone / "energy_uj" for zone in counted)
        self._ranges = {path: _number(path.parent / "max_energy_range_uj") for path in self._energies}
        self.missing = "" if self._energies else _why(bool(counted))
        self._readings: list[Reading] = []
        self._last_uj: dict[Path, float] = {}
        self._total_uj, self._throttled = 0.0, -1.0

    @property
    def shows(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._clocks or self._energies)

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
        energy_uj, at = self._energy_uj(), time.perf_counter()
        count = self._throttle_count()
        reasons = (THROTTLED,) if count > self._throttled >= 0 else ()
        self._throttled = count
        now = moment(at)
        self._readings.append(
            Reading(
                at=now,
                clock_mhz=sum(clocks) / len(clocks) if clocks else None,
                energy_j=None if energy_uj is None else energy_uj / 1e6,
                energy_at=now,
                reasons=reasons,
            )
        )

    def end(self) -> tuple[list[Reading], str]:
        """Return the readings since `begin`, and what went wrong with them, empty if nothing did."""
        clocks, energies = ([getattr(one, name) for one in self._readings] for name in ("clock_mhz", "energy_j"))
        for known, values, what in ((self._clocks, clocks, "frequency"), (self._energies, energies, "energy")):
            if known and None in values:
                return self._readings, f"the processor's {what} can no longer be read"
        return self._readings, ""

    def _energy_uj(self) -> float | None:
        """Return the microjoules of all packages since this reader was made; None if one cannot be read."""
        if not self._energies:
            return None
        for path in self._energies:
            now = _number(path)
            if now is None:
                return None
            before = self._last_uj.get(path, now)
            # The counter begins again after its range, which takes minutes.
            self._total_uj += now - before if now >= before else now - before + (self._ranges[path] or 0.0)
            self._last_uj[path] = now
        return self._total_uj

    def _throttle_count(self) -> float:
        return sum(count for path in self._throttles if (count := _number(path)) is not None)


def _why(counted: bool) -> str:
    if counted:
        return "this processor's energy (RAPL) is readable by root only"
    return "Linux shows no energy of this processor (RAPL)"


def _readable(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if _number(path) is not None]


def _number(path: Path) -> float | None:
    text = _text(path)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
