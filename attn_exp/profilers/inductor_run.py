"""Compile a job again in a process and a folder of its own, with Inductor set to keep what it generates."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.errors import how_it_ended, last_message
from attn_exp.core.files import write_whole
from attn_exp.core.request import REQUEST_NAME, Request

# The worker's entry point that compiles the job; profilers do not import the worker.
_ENTRY = "attn_exp.worker.compile_again"
# Inductor's file with the code of a compiled graph, and the file of its bandwidth profile.
CODE, BANDWIDTH = "output_code.py", "bandwidth.txt"


@dataclass(frozen=True)
class Graph:
    """A compiled graph: its pass, its unique name, and the folder with Inductor's files."""

    direction: str
    name: str
    folder: Path


def compile_again(request: Request, scratch: Path, log: Path, *, with_bandwidth: bool) -> str | None:
    """Compile and call the request's job in `scratch`, with its output in `log`; return why it failed, or None."""
    write_whole(scratch / REQUEST_NAME, msgspec.yaml.encode(_without_graphs(request)))
    variables = {
        "TORCH_COMPILE_DEBUG": "1",
        "TORCH_COMPILE_DEBUG_DIR": str(scratch),
        # A graph from the cache would not be generated again. Kernels and tuning results may come from the cache.
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        # Generate sources that run by themselves and state their bytes.
        "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",
    }
    if with_bandwidth:
        variables |= {"TORCHINDUCTOR_PROFILE": "1", "TORCHINDUCTOR_PROFILE_OUTPUT": str(scratch / BANDWIDTH)}
    command = [sys.executable, "-m", _ENTRY, str(scratch), "--parent", str(os.getpid())]
    with log.open("wb") as file:
        ran = subprocess.run(
            command,
            cwd=scratch,
            env=_importable() | variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        )
    if ran.returncode == 0:
        return None
    cause = last_message(log.read_text(encoding="utf-8", errors="replace")) or "it printed nothing"
    return f"compiling it again {how_it_ended(ran.returncode)}: {cause}"


def graphs_in(scratch: Path) -> list[Graph]:
    """Return the graphs in the order of their compilation.

    Inductor's folders are `model__0_forward_1.0` and so on.
    """
    folders = sorted(
        (path.parent for path in scratch.glob(f"torch_compile_debug/*/torchinductor/*/{CODE}")),
        key=lambda path: int(path.suffix[1:]),
    )
    graphs: list[Graph] = []
    for folder in folders:
        direction = "backward" if "_backward" in folder.name else "forward"
        earlier = sum(graph.direction == direction for graph in graphs)
        graphs.append(Graph(direction, f"{direction}_{earlier}" if earlier else direction, folder))
    return graphs


def _without_graphs(request: Request) -> Request:
    """Return the request without profilers and CUDA graphs: Inductor cannot time a kernel during capture."""
    compile_ = request.compile
    if compile_.mode != "none":
        options: dict[str, Any] = {**compile_.options, "triton.cudagraphs": False}
        compile_ = replace(compile_, options=options)
    return replace(request, profilers=(), compile=compile_, caches=True)


def _importable() -> dict[str, str]:
    """Return the environment with this process's import path, which is valid in another folder too."""
    path = [os.path.abspath(one) for one in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
