"""Compile and call a folder's job for the profiler `inductor`: `python -m attn_exp.worker.compile_again FOLDER`.

The profiler starts it with Inductor's debug variables set (see profilers/inductor.py).
"""

import os
import sys
from pathlib import Path

import torch._inductor.config

from attn_exp.core.host.process import die_with_parent
from attn_exp.core.record.request import read_requests
from attn_exp.worker.run_once import run_once


def main(arguments: list[str]) -> None:
    """Compile and call what the folder's request asks for."""
    die_with_parent(int(arguments[-1]))
    # With a bandwidth profile, Inductor also calls each graph on random inputs while compiling it. In torch 2.11 that
    # call lacks an argument and fails. The calls that follow are profiled in any case.
    torch._inductor.config.benchmark_harness = False
    run_once(read_requests(Path(arguments[0]))[0][0])


if __name__ == "__main__":
    main(sys.argv[1:])
    # Skip the interpreter's teardown: with CUDA loaded it may take seconds, or crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
