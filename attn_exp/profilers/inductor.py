"""Profiler `inductor`: the graphs, kernels and sources that torch.compile generated for a job, and their bytes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.backends.package import Unavailable
from attn_exp.core.errors import how_it_ended, last_message
from attn_exp.core.files import write_whole
from attn_exp.core.record.file import LOG_NAME
from attn_exp.core.record.profile import Profile, ProfiledKernel
from attn_exp.core.record.request import REQUEST_NAME, Request
from attn_exp.profilers.base import Subject
from attn_exp.profilers.inductor_code import Bandwidth, read_bandwidth, read_generated, row_of, table_csv

# The worker's entry point that compiles the job; profilers do not import the worker.
_ENTRY = "attn_exp.worker.compile_again"
# Inductor's file with the code of a compiled graph, and the file of its bandwidth profile.
_CODE, _BANDWIDTH = "output_code.py", "bandwidth.txt"
_TABLE, _BANDWIDTH_LOG = "kernels.csv", "bandwidth.log"
# Inductor's files of a graph, and our names: ATen as AOTAutograd made it, the same after Inductor's passes, and the
# code of the compiled graph.
_GRAPHS = {"fx_graph_readable.py": "aten.py", "fx_graph_transformed.py": "compiled.py", "output_code.py": "code.py"}


@dataclass(frozen=True)
class Graph:
    """A compiled graph: its pass, its unique name, and the folder with Inductor's files."""

    direction: str
    name: str
    folder: Path


class Inductor:
    """Compiles the job again in a process and a folder of its own, with Inductor set to keep what it generates.

    It reuses cached code and tuning results, so the kernels are those that were timed. With `bandwidth`, on a GPU,
    Inductor also times each Triton kernel by itself.
    """

    def __init__(self, name: str, bandwidth: bool = True) -> None:
        self.name, self.bandwidth = name, bandwidth

    def profile(self, subject: Subject) -> Profile:
        """Write `kernels.csv`, `sources/` and `graphs/`.

        With columns of Nsight Compute if `profiler=ncu` ran before. Raises Unavailable if nothing was compiled in this
        job.
        """
        if subject.record.compiled is None:
            raise Unavailable("this job compiled nothing: set compile=default, or choose backend=flex")
        scratch, log = subject.folder / "scratch", subject.folder / LOG_NAME
        scratch.mkdir()
        try:
            with_bandwidth = self.bandwidth and subject.request.device == "cuda"
            missing = None
            failure = compile_again(subject.request, scratch, log, with_bandwidth=with_bandwidth)
            if failure is not None and with_bandwidth:
                # Inductor times kernels from inside the compiled code; everything else is available without that.
                missing = f"no bandwidth profile: {failure}"
                log.rename(subject.folder / _BANDWIDTH_LOG)
                shutil.rmtree(scratch)
                scratch.mkdir()
                failure = compile_again(subject.request, scratch, log, with_bandwidth=False)
            graphs = _graphs_in(scratch)
            if failure is not None or not graphs:
                reason = failure or "Inductor generated nothing: was all of it run by other libraries?"
                return Profile(status="failed", reason=reason, files=subject.kept(LOG_NAME, _BANDWIDTH_LOG))
            measured = self._bandwidth(subject, scratch, graphs)
            found = _profile(subject, graphs, measured)
            return replace(found, reason="; ".join(filter(None, [missing, found.reason])) or None)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _bandwidth(self, subject: Subject, scratch: Path, graphs: list[Graph]) -> dict[str, dict[str, Bandwidth]]:
        """Return Inductor's profile by graph and kernel. It names a graph by a file, a copy of the graph's code."""
        path = scratch / _BANDWIDTH
        if not path.exists():
            return {}
        shutil.copy(path, subject.folder / _BANDWIDTH)
        codes = {graph.name: (graph.folder / _CODE).read_text(encoding="utf-8") for graph in graphs}
        bandwidths: dict[str, dict[str, Bandwidth]] = {}
        for file, rows in read_bandwidth(path.read_text(encoding="utf-8")).items():
            text = Path(file).read_text(encoding="utf-8") if Path(file).exists() else None
            bandwidths |= {name: rows for name, code in codes.items() if code == text}
        return bandwidths


def _profile(subject: Subject, graphs: list[Graph], measured: dict[str, dict[str, Bandwidth]]) -> Profile:
    # The counts of `profiler=ncu` in this job, if it ran before.
    ncu = subject.record.profiles.get("ncu")
    counted = {} if ncu is None else {(one.direction, one.name): one for one in ncu.kernels}
    kernels: list[ProfiledKernel] = []
    files: list[str] = []
    (subject.folder / "graphs").mkdir()
    metrics: dict[str, float] = {}
    for graph in graphs:
        for written, ours in _GRAPHS.items():
            if (graph.folder / written).exists():
                files.append(f"graphs/{graph.name}_{ours}")
                shutil.copy(graph.folder / written, subject.folder / files[-1])
        generated, external = read_generated((graph.folder / _CODE).read_text(encoding="utf-8"))
        of_pass = subject.record.passes.get(graph.direction)
        names = [] if of_pass is None else [kernel.name for kernel in of_pass.kernels]
        timed = as_timed([kernel.name for kernel in generated], names)
        for kernel in generated:
            name = f"sources/{graph.name}/{kernel.file_name}"
            path = subject.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(kernel.source, encoding="utf-8")
            files.append(name)
            kernels.append(
                row_of(
                    graph.direction,
                    replace(kernel, name=timed[kernel.name]),
                    name,
                    measured.get(graph.name, {}).get(kernel.name),
                    counted.get((graph.direction, timed[kernel.name])),
                )
            )
        kernels += [
            ProfiledKernel(
                direction=graph.direction, name=name, count=float(count), figures={"kernel_category": "extern"}
            )
            for name, count in external.items()
        ]
        moved = sum(one.calls * float(one.columns.get("kernel_args_num_gb", 0.0)) for one in generated)
        counts = {"graphs": 1, "kernels": len(generated), "external_calls": sum(external.values())}
        for key, value in (counts | ({"kernel_args_num_gb": moved} if moved else {})).items():
            name = f"{graph.direction}/{key}"
            metrics[name] = metrics.get(name, 0.0) + float(value)
    own = [kernel for kernel in kernels if "kernel_name" in kernel.figures]
    alone = dict.fromkeys(one.name for one in own if counted and "ncu_duration_us" not in one.figures)
    write_whole(subject.folder / _TABLE, table_csv(own).encode())
    return Profile(
        status="ok",
        reason=f"ncu counted no {', '.join(alone)}" if alone else None,
        kernels=tuple(kernels),
        metrics=metrics,
        files=subject.kept(_TABLE, _BANDWIDTH, LOG_NAME, _BANDWIDTH_LOG, *files),
    )


def as_timed(generated: Sequence[str], timed: Iterable[str]) -> dict[str, str]:
    """Return the name under which each generated kernel ran when it was timed, its own if there is none.

    Inductor numbers a graph's kernels. Those that benchmark themselves state their bytes, so that one kernel for
    buffers of several sizes becomes several here, and the numbers of all that follow grow.
    """

    def stem_and_number(name: str) -> tuple[str, int]:
        stem, _, number = name.rpartition("_")
        return (stem, int(number)) if number.isdigit() else (name, -1)

    left: dict[str, list[str]] = {}
    for name in sorted(timed, key=stem_and_number):
        left.setdefault(stem_and_number(name)[0], []).append(name)
    names = {}
    for name in sorted(generated, key=stem_and_number):
        same = left.get(stem_and_number(name)[0], [name])
        names[name] = same.pop(0) if len(same) > 1 else same[0]
    return names


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
        variables |= {"TORCHINDUCTOR_PROFILE": "1", "TORCHINDUCTOR_PROFILE_OUTPUT": str(scratch / _BANDWIDTH)}
    command = [sys.executable, "-m", _ENTRY, str(scratch), "--parent", str(os.getpid())]
    with log.open("wb") as file:
        ran = subprocess.run(
            command,
            cwd=scratch,
            # The import path is valid in another folder too.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        )
    if ran.returncode == 0:
        return None
    cause = last_message(log.read_text(encoding="utf-8", errors="replace")) or "it printed nothing"
    return f"compiling it again {how_it_ended(ran.returncode)}: {cause}"


def _graphs_in(scratch: Path) -> list[Graph]:
    """Return the graphs in the order of their compilation. Inductor's folders are `model__0_forward_1.0` and so on."""
    folders = sorted(
        (path.parent for path in scratch.glob(f"torch_compile_debug/*/torchinductor/*/{_CODE}")),
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
