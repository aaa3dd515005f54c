"""python fake_slurm.py sbatch|srun|sacct|scancel ...: as much of Slurm as submitit uses, on this host.

Jobs are process groups, listed in the folder FAKE_SLURM. There is one partition, `gpu`. Of an array as many tasks start
as FAKE_SLURM_NODES says, all if it is not set; the rest is queued for good.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

JOB = "1234"
QUEUED = "queued"


def sbatch(script: str) -> None:
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    if options.get("partition", "gpu") != "gpu":
        sys.exit(f"sbatch: error: invalid partition specified: {options['partition']}\nsbatch: error: Batch job failed")
    Path(os.environ["FAKE_SLURM"], "options").write_text(repr(options))
    last = re.match(r"0-(\d+)", options["array"]) if "array" in options else None
    for task in range(int(last[1]) + 1 if last else 1):
        kept = Path(os.environ["FAKE_SLURM"], f"job-{JOB}_{task}" if last else f"job-{JOB}")
        if task >= int(os.environ.get("FAKE_SLURM_NODES", task + 1)):
            kept.write_text(QUEUED)
            continue
        array = {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": str(task)} if last else {}
        node = {"SLURM_JOB_ID": JOB, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}
        place = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node7"}
        process = subprocess.Popen(
            ["bash", script],
            env={**os.environ, **array, **node, **place},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        kept.write_text(str(process.pid))
    print(f"Submitted batch job {JOB}")


def srun(*arguments: str) -> None:
    command = list(arguments)
    while command[0].startswith("-"):
        taken = 1 if "=" in command[0] or command[0] == "--unbuffered" else 2
        command = command[taken:]
    os.execvp(command[0], command)


def jobs() -> dict[str, str]:
    found = Path(os.environ["FAKE_SLURM"]).glob("job-*")
    return {path.name.removeprefix("job-"): path.read_text() for path in found}


def sacct(*_: str) -> None:
    print("JobID|State|NodeList")
    for name, process in jobs().items():
        if process in (QUEUED, "cancelled"):
            print(f"{name}|{'PENDING' if process == QUEUED else 'CANCELLED'}|None assigned")
            continue
        try:
            running = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            running = False
        print(f"{name}|{'RUNNING' if running else 'COMPLETED'}|node7")


def scancel(*names: str) -> None:
    for name, process in jobs().items():
        if name in names and process == QUEUED:
            Path(os.environ["FAKE_SLURM"], f"job-{name}").write_text("cancelled")
        elif name in names:
            try:
                os.killpg(int(process), signal.SIGTERM)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
