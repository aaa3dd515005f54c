"""`attn-exp doctor`: check that this machine is measured correctly."""

import os
import subprocess
import sys

from attn_exp.commands.options import Arguments, Command, Option


def run(given: Arguments) -> int:
    """Run the checks in a process of their own; return its exit code."""
    from attn_exp.config.request import resolve_device
    from attn_exp.core.ticker import DELAY_S, STAGES, Ticker
    from attn_exp.core.torch_version import installed_note
    from attn_exp.run.gpus import lease, visible_gpus
    from attn_exp.run.worker_variables import worker_variables

    device, gpus = resolve_device(given.get("device", "auto"), visible_gpus())
    if note := installed_note():
        print(note, flush=True)
    environment = worker_variables(os.environ) | {STAGES: "1"}
    held = None
    if device == "cuda":
        held = lease(gpus, print)
        environment["CUDA_VISIBLE_DEVICES"] = held.gpu.uuid
        print(f"{held.gpu.name} ({held.gpu.uuid})", flush=True)
    ticker = Ticker(delay_s=DELAY_S)
    ticker.stage("starting")
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_exp.doctor.run_checks", device],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ticker.relay(process.stdout)
        return process.wait()
    finally:
        ticker.close()
        # Ctrl-C, too, must leave no process behind.
        process.kill()
        process.wait()
        if held is not None:
            held.release()


COMMAND = Command(
    name="doctor",
    usage="[device=auto|cpu|cuda|cuda:N]",
    about=(
        "Checks with known work that timings on this machine can be trusted, and prints each check with its figures. "
        "The ten checks on a GPU take 1.5 to 4 minutes (97 s on an H200); on a CPU there are four. If all pass, the "
        "smallest difference that this machine can resolve (the margin) and its ceilings are kept for duel and compare."
    ),
    examples=(("attn-exp doctor", "the GPU if there is one"), ("attn-exp doctor device=cpu", "the CPU")),
    options=(
        Option(
            name="device",
            value="DEVICE",
            help="auto, cpu, cuda, or cuda:1 for one GPU of several",
            default="auto",
            choices=("auto", "cpu", "cuda"),
        ),
    ),
    exits=("0 all checks passed", "1 a check failed", "2 invalid command line"),
    run=run,
)
main = COMMAND.main
