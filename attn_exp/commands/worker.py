"""`attn-exp worker FOLDER`: measures the job in a folder again, in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Run the child process' program here; return its exit code."""
    from attn_exp.worker.__main__ import main as run_worker

    return run_worker(list(arguments))


def run_here(folder: Path, device: Any) -> Any:
    """Measure the job in a folder in this process, for `isolation=none`; return the device for the next one."""
    from attn_exp.worker.__main__ import run_folder

    return run_folder(folder, device)[0]
