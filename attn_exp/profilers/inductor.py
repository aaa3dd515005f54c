"""Profiler `inductor`: the graphs, kernels and sources that torch.compile generated for a job, and their bytes."""

import shutil
from dataclasses import replace
from pathlib import Path

from attn_exp.backends.package import Unavailable, WrongOption
from attn_exp.core.files import write_whole
from attn_exp.core.profile import Profile, ProfiledKernel
from attn_exp.core.record_file import LOG_NAME
from attn_exp.profilers.base import Subject
from attn_exp.profilers.inductor_code import read_generated
from attn_exp.profilers.inductor_run import BANDWIDTH, CODE, Graph, compile_again, graphs_in
from attn_exp.profilers.inductor_table import Bandwidth, read_bandwidth, row_of, table_csv

_TABLE, _BANDWIDTH_LOG = "kernels.csv", "bandwidth.log"
# Inductor's files of a graph, and our names: ATen as AOTAutograd made it, the same after Inductor's passes, and the
# code of the compiled graph.
_GRAPHS = {
    "fx_graph_readable.py": "aten.py",
    "fx_graph_transformed.py": "compiled.py",
    "output_code.py": "code.py",
}


class Inductor:
    """Compiles the job again in a process and a folder of its own, with Inductor set to keep what it generates.

    It reuses cached code and tuning results, so the kernels are those that were timed. With `bandwidth`, on a GPU,
    Inductor also times each Triton kernel by itself.
    """

    def __init__(self, name: str, bandwidth: bool = True) -> None:
        if not isinstance(bandwidth, bool):
            raise WrongOption(f"bandwidth={bandwidth!r} is neither true nor false")
        self.name, self.bandwidth = name, bandwidth

    def profile(self, subject: Subject) -> Profile:
        """Write `kernels.csv`, `sources/` and `graphs/`.

        With columns of Nsight Compute if `profiler=ncu` ran before.

        Raises:
            Unavailable: nothing was compiled in this job.
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
            graphs = graphs_in(scratch)
            if failure is not None or not graphs:
                reason = failure or "Inductor generated nothing: was all of it run by other libraries?"
                return Profile(status="failed", reason=reason, files=subject.kept(LOG_NAME, _BANDWIDTH_LOG))
            measured = self._bandwidth(subject, scratch, graphs)
            return replace(_profile(subject, graphs, measured), reason=missing)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _bandwidth(self, subject: Subject, scratch: Path, graphs: list[Graph]) -> dict[str, dict[str, Bandwidth]]:
        """Return Inductor's profile by graph and kernel. It names a graph by a file, a copy of the graph's code."""
        path = scratch / BANDWIDTH
        if not path.exists():
            return {}
        shutil.copy(path, subject.folder / BANDWIDTH)
        codes = {graph.name: (graph.folder / CODE).read_text(encoding="utf-8") for graph in graphs}
        bandwidths: dict[str, dict[str, Bandwidth]] = {}
        for file, rows in read_bandwidth(path.read_text(encoding="utf-8")).items():
            text = Path(file).read_text(encoding="utf-8") if Path(file).exists() else None
            bandwidths |= {name: rows for name, code in codes.items() if code == text}
        return bandwidths


def _profile(subject: Subject, graphs: list[Graph], measured: dict[str, dict[str, Bandwidth]]) -> Profile:
    counted = _counted(subject)
    kernels: list[ProfiledKernel] = []
    files: list[str] = []
    metrics: dict[str, float] = {}
    for graph in graphs:
        files += _keep_graphs(subject.folder, graph)
        generated, external = read_generated((graph.folder / CODE).read_text(encoding="utf-8"))
        for kernel in generated:
            name = f"sources/{graph.name}/{kernel.file_name}"
            path = subject.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(kernel.source, encoding="utf-8")
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
            (
                "kernel_args_num_gb",
                sum(one.calls * float(one.columns.get("kernel_args_num_gb", 0.0)) for one in generated),
            ),
        ):
            name = f"{graph.direction}/{key}"
            metrics[name] = metrics.get(name, 0.0) + float(value)
    own = [kernel for kernel in kernels if "kernel_name" in kernel.figures]
    write_whole(subject.folder / _TABLE, table_csv(own).encode())
    return Profile(
        status="ok",
        kernels=tuple(kernels),
        metrics={name: value for name, value in metrics.items() if value or not name.endswith("_gb")},
        files=subject.kept(_TABLE, BANDWIDTH, LOG_NAME, _BANDWIDTH_LOG, *files),
    )


def _keep_graphs(folder: Path, graph: Graph) -> list[str]:
    kept = []
    (folder / "graphs").mkdir(exist_ok=True)
    for written, ours in _GRAPHS.items():
        if (graph.folder / written).exists():
            name = f"graphs/{graph.name}_{ours}"
            shutil.copy(graph.folder / written, folder / name)
            kept.append(name)
    return kept


def _counted(subject: Subject) -> dict[tuple[str, str], ProfiledKernel]:
    """Return what `profiler=ncu` counted in this job, by pass and kernel; empty if it did not run before."""
    profile = subject.record.profiles.get("ncu")
    return {(one.direction, one.name): one for one in profile.kernels} if profile is not None else {}
