"""Run a profiler in a process of its own, for profilers that cannot share CUPTI with what the worker did before."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from attn_exp.core.errors import how_it_ended
from attn_exp.core.profile import RESULT_NAME, Profile
from attn_exp.core.record_file import LOG_NAME
from attn_exp.profilers.base import Subject

# The worker's entry point that prepares the job again and runs the profiler; profilers do not import the worker.
_ENTRY = "attn_exp.worker.profile_apart"


class ProcessLost(Exception):
    """The profiler's process ended without a result; the message says how."""


def profile_apart(subject: Subject, options: Mapping[str, Any]) -> Profile:
    """Run the profiler that `options` describe in a new process and return its profile.

    The new process is killed when this one ends.

    Args:
        subject: the timed job.
        options: `_target_`, `name` and the constructor's arguments.

    Raises:
        ProcessLost: the process ended without a result.
    """
    name, encoded = options["name"], msgspec.json.encode(options).decode()
    command = [sys.executable, "-m", _ENTRY, str(subject.job), encoded, "--parent", str(os.getpid())]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    path = subject.folder / RESULT_NAME
    if not path.exists():
        how = how_it_ended(ended.returncode)
        raise ProcessLost(f"the process of profiler={name} {how}: see {subject.job / LOG_NAME}")
    profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    path.unlink()
    return profile
