"""python -m sleeper: takes the worker's place and sleeps instead of measuring; says if two sleep on one GPU at once.

It sleeps for `stopping.budget_s`, job after job; a record's `in_turns` says how many jobs its run had. `kill` among the
options of a job's backend is the signal that it dies by.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout
from worker_arguments import arguments

from attn_exp.core.host.nvml import GpuInfo
from attn_exp.core.host.process import die_with_parent
from attn_exp.core.record.file import write_record
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import REQUEST_NAME, Request
from attn_exp.execution.gpus import _lock_path


def _leased(uuid: str) -> bool:
    lock = FileLock(_lock_path(GpuInfo(0, "", uuid)))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def measure(folder: Path, beside: int) -> None:
    request = msgspec.yaml.decode((folder / REQUEST_NAME).read_bytes(), type=Request)
    began = time.time()
    busy = folder.parent / f"busy-{request.gpu_uuid}"
    reason = None
    if request.device == "cuda":
        try:
            os.close(os.open(busy, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            reason = "two at once"
        if request.gpu_uuid is None or not _leased(request.gpu_uuid):
            reason = f"no lease of {request.gpu_uuid}"
    time.sleep(request.measuring.budget_s)
    if "kill" in request.backend:
        busy.unlink(missing_ok=True)
        os.kill(os.getpid(), getattr(signal, request.backend["kill"]))
    metrics = {
        f"{name}/{what}": 10.0
        for name in request.measuring.passes
        for what in ("time_us", "tflops", "time_half_width", "error_out", "error_dq")
    }
    busy.unlink(missing_ok=True)
    environment = {"gpu": "Sleeper", "gpu_uuid": request.gpu_uuid, "in_turns": beside}
    record = Record(
        request=request,
        status="error" if reason else "ok",
        reason=reason,
        metrics={} if reason else metrics,
        environment=environment,
        started_at=began,
        finished_at=time.time(),
    )
    write_record(record, folder)


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(given.parent)
    replies = os.fdopen(given.reply_fd, "w", buffering=1)
    replies.write("ready\n")
    for line in sys.stdin:
        run = line.rstrip("\n")
        replies.write(f"begin {run}\n")
        for folder in json.loads(run)["folders"]:
            replies.write(f"check {json.dumps(folder)}\n")
            measure(Path(folder), beside=len(json.loads(run)["folders"]))
            replies.write(f"done {json.dumps(folder)}\n")
        replies.write(f"end {run}\n")


if __name__ == "__main__":
    main()
