"""Profile a timed job in a process of its own: `python -m attn_exp.worker.profile_apart FOLDER OPTIONS`.

Prepares the job in FOLDER again and runs the profiler that OPTIONS describe: JSON with `_target_`, `name` and the
constructor's arguments. Writes the profile as `profile.json` into the profiler's folder.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.host.process import die_with_parent
from attn_exp.core.record.file import read_record
from attn_exp.core.record.profile import RESULT_NAME, Profile, profile_folder
from attn_exp.profilers.base import Early, load_profiler
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.prepare import prepare
from attn_exp.worker.profile_pass import run_profiler, subject_of


def main(arguments: list[str]) -> None:
    """Profile the job in a folder."""
    job, options = Path(arguments[0]), msgspec.json.decode(arguments[1], type=dict[str, Any])
    if "--parent" in arguments:
        die_with_parent(int(arguments[-1]))
    record = read_record(job)
    if record is None:
        raise SystemExit(f"{job} has no record")
    request = record.request
    folder = profile_folder(job, options["name"])

    def profile() -> Profile:
        profiler = load_profiler(options)
        if isinstance(profiler, Early):
            profiler.begin(folder)
        machine = Machine.open(request.device)
        # The ceilings are known; measuring them again would only heat the GPU for seconds.
        machine.ceilings[request.case.dtype] = record.ceilings
        return profiler.profile(subject_of(record, prepare(Attempt(request), machine), machine, job, folder))

    (folder / RESULT_NAME).write_bytes(msgspec.json.encode(run_profiler(profile, job, folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
    # Skip the interpreter's teardown: with CUDA and CUPTI loaded it may take seconds, or crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
