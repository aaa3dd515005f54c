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

from attn_exp.core.nvml import GpuState
from attn_exp.core.process import die_with_parent

# Energy in each turn, everything else in one of four. A turn that took long is followed by as long a rest.
TURN_S, TURNS = 0.005, 4


def serve(state: GpuState, commands: int, out: int) -> None:
    """Read while asked to, until `commands` ends."""
    active, turn, due = False, 0, 0.0
    while True:
        ready, _, _ = select.select([commands], [], [], max(0.0, due - time.perf_counter()) if active else None)
        if ready:
            words = os.read(commands, 4096)
            if not words:
                return
            active, turn, due = words.endswith(b"+"), 0, 0.0
        elif active:
            began = time.perf_counter()
            _write(out, _read(state, everything=turn % TURNS == 0))
            took, turn = time.perf_counter() - began, turn + 1
            due = began + max(TURN_S, 2 * took)


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
