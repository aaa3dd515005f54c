"""Facts that Linux reports about the processor: name, instruction sets, governor, and CPUs open to this process.

Each function takes the root of the file system, which tests replace, and returns None for what Linux does not show.
"""

import os
import platform
import re
from collections.abc import Collection, Iterable
from pathlib import Path

_ROOT = Path("/")
_CPU = "sys/devices/system/cpu"
# The flags of a processor by which kernels are chosen: vectors, matrix units, half precision.
_INSTRUCTION_SETS = re.compile(r"^(avx|amx|fma|f16c|vnni|sse4|asimd|sve|sme(2|_|$)|bf16|i8mm|fphp|vsx|rvv|v$)")


def cpu_name(root: Path = _ROOT) -> str:
    """Return the processor's name, empty if Linux does not show it."""
    lines = _lines(root / "proc/cpuinfo")
    if not lines:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def instruction_sets(root: Path = _ROOT) -> str | None:
    """Return the flags of /proc/cpuinfo that name vector and matrix instructions, sorted: `avx2 avx512_bf16 fma`."""
    for line in _lines(root / "proc/cpuinfo"):
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(word for word in words.split() if _INSTRUCTION_SETS.match(word)))
    return None


def allowed_cpus() -> tuple[int, ...]:
    """Return the processors that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as Linux writes them: `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def numbers_of(text: str) -> list[int]:
    """Return the numbers that `ranges` wrote."""
    parts = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [number for first, last in parts for number in range(int(first), int(last or first) + 1)]


def governor(cpus: Collection[int], root: Path = _ROOT) -> str | None:
    """Return the frequency governors of these processors: `performance`, or several with `+` between them."""
    found = {_word(root / _CPU / f"cpu{cpu}/cpufreq/scaling_governor") for cpu in cpus} - {None}
    return "+".join(sorted(filter(None, found))) or None


def numa_nodes(cpus: Collection[int], root: Path = _ROOT) -> str | None:
    """Return the memory nodes that these processors belong to, as `ranges` writes them."""
    nodes = {
        int(folder.name.removeprefix("node"))
        for cpu in cpus
        for folder in (root / _CPU / f"cpu{cpu}").glob("node[0-9]*")
    }
    return ranges(nodes) if nodes else None


def numa_node_of_device(bus_id: str, root: Path = _ROOT) -> int | None:
    """Return the memory node of a PCI device by its address, such as `00000000:19:00.0`; None if it has none."""
    domain, _, rest = bus_id.lower().partition(":")
    word = _word(root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node")
    # Linux writes -1 where the firmware names none.
    return int(word) if word is not None and word.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _word(path: Path) -> str | None:
    lines = _lines(path)
    return lines[0].strip() if lines else None
