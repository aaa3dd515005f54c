"""`attn-exp doctor`: check that this machine is measured correctly."""

import os
import subprocess
import sys
from dataclasses import dataclass

from attn_exp.commands.options import Command
from attn_exp.core.live_line import STAGE, STAGES, LiveLine
from attn_exp.core.options import Options, device_option
from attn_exp.core.text import at_width


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """Checks with known work that timings on this machine can be trusted, and prints each check with its figures.

    The eleven checks take about five minutes on a GPU; a CPU has four. If all pass, the smallest difference that this
    machine can resolve (the margin) and its ceilings are kept for duel and compare.
    """

    device: str = device_option()


def run(options: DoctorOptions) -> int:
    """Run the checks in a process of their own; return its exit code."""
    from attn_exp.config.request import resolve_device
    from attn_exp.core.host.nvml import visible_gpus
    from attn_exp.core.versions import installed_note
    from attn_exp.execution.gpus import leased
    from attn_exp.execution.worker_process import worker_variables

    device, gpus = resolve_device(options.device, visible_gpus())
    if note := installed_note():
        print(note, flush=True)
    environment = worker_variables(os.environ) | {STAGES: "1"}
    with leased(device, gpus, environment, print) as gpu, LiveLine() as line:
        if gpu is not None:
            print(f"{gpu.name} ({gpu.uuid})", flush=True)
        line.show("starting")
        command = [sys.executable, "-m", "attn_exp.doctor.run_checks", device]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            for printed in process.stdout:
                if printed.startswith(STAGE):
                    share, _, text = printed.removeprefix(STAGE).strip().partition(" ")
                    line.show(text, done=float(share), total=1.0)
                    continue
                with line.aside():
                    print(at_width(printed.rstrip("\n"), sys.stdout), flush=True)
            return process.wait()
        finally:
            # Ctrl-C, too, must leave no process behind.
            process.kill()
            process.wait()


COMMAND = Command(
    name="doctor",
    usage="[device=auto|cpu|cuda|cuda:N]",
    options=DoctorOptions,
    run=run,
    examples=(("attn-exp doctor", "the GPU if there is one"), ("attn-exp doctor device=cpu", "the CPU")),
    exits=("0 all checks passed", "1 a check failed", "2 invalid command line"),
)
main = COMMAND.main
