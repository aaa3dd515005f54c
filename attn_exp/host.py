"""Host: how much of the processors other programs used while a CPU was measured. Linux' own counters."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# /proc/stat counts in ticks of 10 ms a processor.
_SLACK_S = 0.03


def host_reading() -> dict[str, Any]:
    """CPU seconds that this host's processors have been busy (or taken by a hypervisor), and that this process used.

    Empty where Linux' /proc cannot be read.
    """
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return {}
    user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in fields[:8])
    busy = user + nice + system + irq + softirq + steal
    return {"at": time.time(), "busy_s": busy / os.sysconf("SC_CLK_TCK"), "own_s": time.process_time()}


def others_cores(first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    """How many processors other programs kept busy between two readings; 0.0 where that cannot be known."""
    if "busy_s" not in first or "busy_s" not in last or last["at"] <= first["at"]:
        return 0.0
    others_s = (last["busy_s"] - first["busy_s"]) - (last["own_s"] - first["own_s"]) - _SLACK_S
    return float(max(0.0, others_s / (last["at"] - first["at"])))
