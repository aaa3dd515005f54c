"""python -m attn_exp.doctor [device=auto|cpu|cuda|cuda:N]: proves that this machine is measured right.

Ten proofs on a GPU, what a CPU allows without one, a line each, pass or fail with its figure; under 3 minutes on a
GPU. Keeps the machine's smallest meaningful difference (the margin), which `python -m attn_exp.duel` uses, and its
ceilings. Exits 1 if a proof fails.
"""

import os
import subprocess
import sys

from attn_exp.config.request import resolve_device
from attn_exp.core.errors import UserError
from attn_exp.core.torch_version import installed_note
from attn_exp.run.gpus import lease, visible_gpus
from attn_exp.run.worker_process import worker_variables


def main(arguments: list[str]) -> int:
    """Run the proofs in a process of their own; its exit code, or 2 after a mistake of the user's."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        device, gpus = resolve_device(_asked(arguments), visible_gpus())
    except UserError as error:
        print(f"attn_exp.doctor: {error}", file=sys.stderr)
        return 2
    if note := installed_note():
        print(note, flush=True)
    environment = worker_variables(os.environ)
    held = None
    if device == "cuda":
        held = lease(gpus, print)
        environment["CUDA_VISIBLE_DEVICES"] = held.gpu.uuid
        print(f"{held.gpu.name} ({held.gpu.uuid})", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "attn_exp.doctor.run_checks", device], env=environment)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        return 130
    finally:
        if held is not None:
            held.release()


def _asked(arguments: list[str]) -> str:
    if not arguments:
        return "auto"
    key, _, value = arguments[0].partition("=")
    if len(arguments) > 1 or key != "device" or not value:
        raise UserError("the doctor takes one option: device=auto, device=cpu, device=cuda or device=cuda:N")
    return value
