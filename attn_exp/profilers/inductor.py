"""Inductor: what torch.compile made of a job: its graphs, its kernels with their sources, and what they move."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.backends.package import Unavailable
from attn_exp.profile import Profile, ProfiledKernel
from attn_exp.profilers.base import Subject
from attn_exp.profilers.inductor_code import read_generated
from attn_exp.profilers.inductor_table import Bandwidth, read_bandwidth, row_of, table_csv
from attn_exp.record import LOG_NAME, REQUEST_NAME, Request, write_whole

_TABLE, _BANDWIDTH = "kernels.csv", "bandwidth.txt"
# What Inductor writes about a graph, and what it is called here: ATen as AOTAutograd made it, the same after Inductor's
# own passes, and the code of the compiled graph.
_GRAPHS = {
    "fx_graph_readable.py": "aten.py",
    "fx_graph_transformed.py": "compiled.py",
    "output_code.py": "code.py",
}
_CODE = "output_code.py"


@dataclass(frozen=True)
class _Graph:
    """A compiled graph: its pass, a name that is its own, and the folder with what Inductor wrote about it."""

    direction: str
    name: str
    folder: Path


class Inductor:
    """Compiles the job once more in a process and a folder of its own, with Inductor told to keep what it makes.

    Compiled code and tuning results that are cached already are used again, so the kernels are those that were timed.
    With `bandwidth` each kernel in Triton is also timed by Inductor, on a GPU: a time of one kernel alone.
    """

    def __init__(self, name: str, bandwidth: bool = True) -> None:
        if not isinstance(bandwidth, bool):
            raise TypeError(f"bandwidth={bandwidth!r} is neither true nor false")
        self.name, self.bandwidth = name, bandwidth

    def profile(self, subject: Subject) -> Profile:
        """`kernels.csv`, `sources/` and `graphs/`; columns of Nsight Compute where `profiler=ncu` ran before.

        Raises:
            Unavailable: nothing was compiled in this job.
        """
        if subject.record.compiled is None:
            raise Unavailable("this job compiled nothing: set compile=default, or choose backend=flex")
        scratch = subject.folder / "scratch"
        scratch.mkdir()
        try:
            with_bandwidth = self.bandwidth and subject.request.device == "cuda"
            lacking = None
            said = self._compile(subject, scratch, with_bandwidth=with_bandwidth)
            if said is not None and with_bandwidth:
                # Inductor times kernels from inside of the compiled code; all else can be had without that.
                lacking = f"no bandwidth profile: {said}"
                shutil.rmtree(scratch)
                scratch.mkdir()
                said = self._compile(subject, scratch, with_bandwidth=False)
            graphs = _graphs(scratch)
            if said is not None or not graphs:
                reason = said or "Inductor generated nothing: was all of it run by other libraries?"
                return Profile(status="failed", reason=reason, files=subject.kept(LOG_NAME))
            measured = self._bandwidth(subject, scratch, graphs)
            return replace(_profile(subject, graphs, measured), reason=lacking)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _compile(self, subject: Subject, scratch: Path, *, with_bandwidth: bool) -> str | None:
        """Run the worker's command in `scratch`; why it failed, or None."""
        write_whole(scratch / REQUEST_NAME, msgspec.yaml.encode(_without_graphs(subject.request)))
        told = {
            "TORCH_COMPILE_DEBUG": "1",
            "TORCH_COMPILE_DEBUG_DIR": str(scratch),
            # A graph from the cache would not be generated again; kernels and tuning results may come from there.
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
            # Sources that run on their own, and how many bytes each moves.
            "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",
        }
        if with_bandwidth:
            told |= {"TORCHINDUCTOR_PROFILE": "1", "TORCHINDUCTOR_PROFILE_OUTPUT": str(scratch / _BANDWIDTH)}
        command = [sys.executable, "-m", "attn_exp.worker", "--once", str(scratch)]
        log = subject.folder / LOG_NAME
        with log.open("wb") as file:
            ran = subprocess.run(
                command,
                cwd=scratch,
                env=_importable() | told,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                check=False,
            )
        if ran.returncode == 0:
            return None
        lines = log.read_text(errors="replace").strip().splitlines()
        return f"compiling it once more ended with code {ran.returncode}: {lines[-1] if lines else 'it said nothing'}"

    def _bandwidth(self, subject: Subject, scratch: Path, graphs: list[_Graph]) -> dict[str, dict[str, Bandwidth]]:
        """Inductor's profile by graph and kernel. It names a graph by a file, whose copy is the graph's code."""
        path = scratch / _BANDWIDTH
        if not path.exists():
            return {}
        shutil.copy(path, subject.folder / _BANDWIDTH)
        codes = {graph.name: (graph.folder / _CODE).read_text() for graph in graphs}
        found: dict[str, dict[str, Bandwidth]] = {}
        for file, rows in read_bandwidth(path.read_text()).items():
            text = Path(file).read_text() if Path(file).exists() else None
            found |= {name: rows for name, code in codes.items() if code == text}
        return found


def _profile(subject: Subject, graphs: list[_Graph], measured: dict[str, dict[str, Bandwidth]]) -> Profile:
    counted = _counted(subject)
    kernels: list[ProfiledKernel] = []
    files: list[str] = []
    metrics: dict[str, float] = {}
    for graph in graphs:
        files += _keep_graphs(subject.folder, graph)
        generated, external = read_generated((graph.folder / _CODE).read_text())
        for kernel in generated:
            name = f"sources/{graph.name}/{kernel.file_name}"
            path = subject.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(kernel.source)
            files.append(name)
            kernels.append(
                row_of(
                    graph.direction,
                    kernel,
                    name,
                    measured.get(graph.name, {}).get(kernel.name),
                    counted.get((graph.direction, kernel.name)),
                )
            )
        kernels += [
            ProfiledKernel(
                direction=graph.direction, name=name, count=float(count), figures={"kernel_category": "extern"}
            )
            for name, count in external.items()
        ]
        for key, value in (
            ("graphs", 1),
            ("kernels", len(generated)),
            ("external_calls", sum(external.values())),
            ("kernel_args_num_gb", sum(float(one.columns.get("kernel_args_num_gb", 0.0)) for one in generated)),
        ):
            name = f"{graph.direction}/{key}"
            metrics[name] = metrics.get(name, 0.0) + float(value)
    own = [kernel for kernel in kernels if "kernel_name" in kernel.figures]
    write_whole(subject.folder / _TABLE, table_csv(own).encode())
    return Profile(
        status="ok",
        kernels=tuple(kernels),
        metrics={name: value for name, value in metrics.items() if value or not name.endswith("_gb")},
        files=subject.kept(_TABLE, _BANDWIDTH, LOG_NAME, *files),
    )


def _keep_graphs(folder: Path, graph: _Graph) -> list[str]:
    kept = []
    (folder / "graphs").mkdir(exist_ok=True)
    for written, ours in _GRAPHS.items():
        if (graph.folder / written).exists():
            name = f"graphs/{graph.name}_{ours}"
            shutil.copy(graph.folder / written, folder / name)
            kept.append(name)
    return kept


def _graphs(scratch: Path) -> list[_Graph]:
    """The graphs in the order in which they were compiled. Inductor's folders are `model__0_forward_1.0` and so on."""
    folders = sorted(
        (path.parent for path in scratch.glob(f"torch_compile_debug/*/torchinductor/*/{_CODE}")),
        key=lambda path: int(path.suffix[1:]),
    )
    found: list[_Graph] = []
    for folder in folders:
        direction = "backward" if "_backward" in folder.name else "forward"
        earlier = sum(graph.direction == direction for graph in found)
        found.append(_Graph(direction, f"{direction}_{earlier}" if earlier else direction, folder))
    return found


def _counted(subject: Subject) -> dict[tuple[str, str], ProfiledKernel]:
    """What `profiler=ncu` counted in this job, by pass and kernel; empty if it did not run before."""
    profile = subject.record.profiles.get("ncu")
    return {(one.direction, one.name): one for one in profile.kernels} if profile is not None else {}


def _without_graphs(request: Request) -> Request:
    """The request without profilers and CUDA graphs: Inductor cannot time a kernel while a graph is captured."""
    compile_ = request.compile
    if compile_.mode != "none":
        options: dict[str, Any] = {**compile_.options, "triton.cudagraphs": False}
        compile_ = replace(compile_, options=options)
    return replace(request, profilers=(), compile=compile_, caches=True)


def _importable() -> dict[str, str]:
    """The environment, with what is importable where the job was started importable in another folder too."""
    path = [os.path.abspath(one) for one in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
