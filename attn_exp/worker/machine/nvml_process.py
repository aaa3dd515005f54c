"""Read NVML beside what a worker times: `python -m attn_exp.worker.machine.nvml_process UUID FD`.

It is a process of its own: a thread would take turns with the worker's own for the interpreter's lock. `+` on standard
input begins the readings and `-` ends them; the end of standard input ends the process. Each reading is a line of JSON
in the file FD, which is memory: nobody ever waits for this process, whatever a driver does.
"""

import json
import os
import select
import sys
import time
from typing import Any

import pynvml

from attn_exp.core.host.nvml import GpuState
from attn_exp.core.host.process import die_with_parent

# Energy in each turn, everything else in one of four. A turn that took long is followed by as long a rest.
TURN_S, TURNS = 0.005, 4
# So it goes on for so long after the beginning, since a pass may be short. Then energy and everything else may each
# take this share of a processor: a driver was seen to compute for 3 ms and for 16 ms.
BRISK_S, SHARE = 0.1, 0.05
# Energy is read so often whatever it costs: a pass of 50 ms has a reading.
LONGEST_S = 0.045


class Turns:
    """When to read, and what: by what earlier turns took. Times are in seconds."""

    def __init__(self, began: float) -> None:
        self._began = self.due = self._all_due = began
        self._turn = 0

    def everything(self, now: float) -> bool:
        """Return whether to read all there is in the turn that begins now, or energy only."""
        return self._turn % TURNS == 0 if self._brisk(now) else now >= self._all_due

    def took(self, began: float, wall_s: float, cpu_s: float, *, everything: bool) -> None:
        """Note how long a turn lasted, and how much processor time it took."""
        self._turn += 1
        rest_s = max(TURN_S, 2 * wall_s)
        if not self._brisk(began):
            rest_s = max(rest_s, min(LONGEST_S, cpu_s / SHARE))
        self.due = began + rest_s
        if everything:
            self._all_due = began + max(TURNS * TURN_S, cpu_s / SHARE)

    def _brisk(self, now: float) -> bool:
        return now < self._began + BRISK_S


def serve(state: GpuState, commands: int, out: int) -> None:
    """Read while asked to, until `commands` ends."""
    turns: Turns | None = None
    while True:
        wait_s = None if turns is None else max(0.0, turns.due - time.perf_counter())
        ready, _, _ = select.select([commands], [], [], wait_s)
        if ready:
            words = os.read(commands, 4096)
            if not words:
                return
            turns = Turns(time.perf_counter()) if words.endswith(b"+") else None
        elif turns is not None:
            began, cpu_began = time.perf_counter(), time.process_time()
            everything = turns.everything(began)
            _write(out, _read(state, everything=everything))
            cpu_s = time.process_time() - cpu_began
            turns.took(began, time.perf_counter() - began, cpu_s, everything=everything)


def _read(state: GpuState, *, everything: bool) -> dict[str, Any]:
    found = state.energy()
    began = time.perf_counter()
    if everything:
        found |= state.now()
    return {"at": (began + time.perf_counter()) / 2, **found}


def _write(out: int, line: dict[str, Any]) -> None:
    os.write(out, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def main() -> None:
    """Serve the GPU and the file that the command line names."""
    uuid, out = sys.argv[1], int(sys.argv[2])
    die_with_parent(int(sys.argv[3]))
    try:
        state = GpuState(uuid)
    except pynvml.NVMLError as error:
        _write(out, {"error": f"NVML: {error}"})
        return
    serve(state, 0, out)


if __name__ == "__main__":
    main()
