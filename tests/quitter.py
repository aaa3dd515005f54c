"""python -m quitter: takes the worker's place; what it does after a job is said by a file `then` in the job's folder.

`exit` ends the process between two jobs, `die` ends it while all jobs of a run are timed, `die in STAGE` when this job
is at a stage, `daemon` leaves a process in a group of its own
behind, `escaped` one without the worker's environment, whose parent is gone, and `escaped, then killed by N` ends it by
signal N behind that; `chatter` writes a long log, `stages` says what a job does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from worker_arguments import arguments


def main() -> None:
    given = arguments()
    replies = os.fdopen(given.reply_fd, "wb", buffering=0)
    replies.write(b"ready\n")
    for line in sys.stdin:
        run = line.rstrip("\n")
        folders = [Path(folder) for folder in json.loads(run)["folders"]]
        replies.write(f"begin {run}\n".encode())
        thens = [(folder / "then").read_text() for folder in folders]
        for folder, then in zip(folders, thens, strict=True):
            name = json.dumps(str(folder))
            if then == "stages":
                for stage in ("check", "compile", "time"):
                    replies.write(f"{stage} {name}\n".encode())
            if then.startswith("die in "):
                replies.write(f"{then.split()[-1]} {name}\n".encode())
                os._exit(3)
        if "die" in thens:
            replies.write(f"time {run}\n".encode())
            os._exit(3)
        for folder, then in zip(folders, thens, strict=True):
            obey(folder, then)
            (folder / "by").write_text(str(os.getpid()))
            (folder / "run").write_text(run)
            replies.write(f"done {json.dumps(str(folder))}\n".encode())
        replies.write(f"end {run}\n".encode())
        if "exit" in thens:
            os._exit(4)


def obey(folder: Path, then: str) -> None:
    if then == "daemon":
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (folder / "daemon").write_text(str(left.pid))
    if then.startswith("escaped"):
        # stdout=-3 is subprocess.DEVNULL.
        starts = "s.Popen(['sleep', '600'], env={}, stdout=-3, start_new_session=True).pid"
        code = f"import subprocess as s; print({starts})"
        (folder / "daemon").write_bytes(subprocess.check_output([sys.executable, "-Sc", code]))
    if then.startswith("escaped, then killed by "):
        os.kill(os.getpid(), int(then.split()[-1]))
    if then == "chatter":
        with (folder / "worker.log").open("wb") as log:
            log.write(b"first\n" + b"x" * (40 << 20) + b"\nlast")


if __name__ == "__main__":
    main()
