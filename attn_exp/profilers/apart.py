"""Apart: a profiler in a process of its own, for those that cannot share CUPTI with what a worker has done before.

`python -m attn_exp.profilers.apart FOLDER OPTIONS` prepares the job of a folder anew. Over it runs the profiler that
the options make (JSON: `_target_`, `name` and what its constructor takes); what that found is left as `profile.json`
among the profiler's files.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.errors import how_it_ended
from attn_exp.core.process import die_with_parent
from attn_exp.core.profile import Profile, profile_folder
from attn_exp.core.record import LOG_NAME, read_record
from attn_exp.profilers.base import Early, Subject, load_profiler
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.device import Machine
from attn_exp.worker.prepare import prepare
from attn_exp.worker.profile_pass import tried

_RESULT = "profile.json"


class ProcessLost(Exception):
    """The process of a profiler ended without a result; the message says how."""


def profile_apart(subject: Subject, options: Mapping[str, Any]) -> Profile:
    """What the profiler of these options finds in a process of its own, which dies with this one.

    Raises:
        ProcessLost: it ended without a result.
    """
    name, typed = options["name"], msgspec.json.encode(options).decode()
    command = [sys.executable, "-m", __name__, str(subject.job), typed, "--parent", str(os.getpid())]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    path = subject.folder / _RESULT
    if not path.exists():
        how = how_it_ended(ended.returncode)
        raise ProcessLost(f"the process of profiler={name} {how}: see {subject.job / LOG_NAME}")
    found = msgspec.json.decode(path.read_bytes(), type=Profile)
    path.unlink()
    return found


def main(arguments: list[str]) -> None:
    """Profile the job of a folder."""
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
        # Measured already: seconds of load would only heat the chip.
        machine.ceilings[request.case.dtype] = record.ceilings
        rival = prepare(Attempt(request), machine)
        return profiler.profile(Subject(record, rival.backend, rival.calls, rival.scope, machine, job, folder))

    (folder / _RESULT).write_bytes(msgspec.json.encode(tried(profile, job, folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
    # As a worker: teardown of CUDA and CUPTI may take seconds, or crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
