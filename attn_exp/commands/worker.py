"""`attn-exp worker FOLDER`: measures the job in a folder again, in this process."""

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run the child process' program here; return its exit code."""
    from attn_exp.worker.__main__ import main as run_worker

    return run_worker(list(arguments))
