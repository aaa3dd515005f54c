"""Read Inductor's generated code: its kernels with their sources, and columns that describe each.

PyTorch has a table of these columns (`kernel_metadata` in torch/_inductor/metrics.py), but in torch 2.11 and 2.13
enabling it breaks compilation. It expects `size_hints=[...]` where the code has `size_hints={...}` ("size_hints
missing!"). The columns are therefore read here, by name, from what every version writes.
"""

import ast
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attn_exp.core.record.profile import IN_PLACE, ProfiledKernel
from attn_exp.profilers.base import csv_text

# PyTorch's names, in its order.
COLUMNS = (
    *("kernel_name", "kernel_path", "kernel_category", "size_hints", "reduction_hint", "line_of_code", "num_load"),
    *("num_store", "num_for_loop", "num_atomic_add", "num_args", "xnumel", "ynumel", "rnumel", "kernel_args_num_gb"),
    IN_PLACE,
)
_COUNTED = {"num_load": "tl.load", "num_store": "tl.store", "num_for_loop": "for ", "num_atomic_add": "tl.atomic_add"}
_ENDINGS = {"triton": "py", "cpp": "cpp"}
_LONGEST_NAME = 150
# Functions of the generated file that a call does not run.
_BESIDE = re.compile(r"benchmark|get_args")
BANDWIDTH = ("ms", "gb", "gb_per_s", "share")
NCU = ("ncu_duration_us", "ncu_mem_bw_gbps", "ncu_mem_accessed_gb")
_SECTION = re.compile(r"^TRITON KERNELS BANDWIDTH INFO \((.*)\)$")
_ROW = re.compile(r"^([\d.]+)ms\s+([\d.]+) GB\s+([\d.]+)GB/s\s+([\d.]+)%\s+(\S+)$")


@dataclass(frozen=True)
class Generated:
    """A kernel: its name, the language and text of its source, how often a call runs it, and PyTorch's columns."""

    name: str
    language: str
    source: str
    calls: int
    columns: dict[str, float | str]

    @property
    def file_name(self) -> str:
        """Return a name for the source's file: the kernel's, of which a long one keeps its end, where names differ."""
        return f"{self.name[-_LONGEST_NAME:]}.{_ENDINGS.get(self.language, 'txt')}"


def read_generated(code: str) -> tuple[list[Generated], dict[str, int]]:
    """Return the kernels that a file of Inductor's output defines, and how often it calls each external one.

    Raises SyntaxError if the text is no Python.
    """
    tree = ast.parse(code)
    called = list(_called(tree))
    kernels = []
    for node in tree.body:
        definition = _definition(node)
        if definition is not None:
            name, language, source = definition
            columns = triton_columns(source) if language == "triton" else {"kernel_category": language}
            columns = {"kernel_name": name, "line_of_code": len(source.strip().splitlines()), **columns}
            kernels.append(Generated(name, language, source, called.count(name), columns))
    external = [name for name in called if name.startswith(("extern_kernels.", "torch.ops."))]
    return kernels, {name: external.count(name) for name in dict.fromkeys(external)}


def triton_columns(source: str) -> dict[str, float | str]:
    """Return the columns that a Triton kernel's source has."""
    columns: dict[str, float | str] = {}
    words = {
        "kernel_category": r"@triton_heuristics\.(\w+)",
        "size_hints": r"size_hints=(\{[^}]*\}|\[[^\]]*\])",
        "reduction_hint": r"reduction_hint=ReductionHint\.(\w+)",
    }
    for name, pattern in words.items():
        match = re.search(pattern, source)
        if match:
            columns[name] = match[1]
    written = re.search(r"mutated_arg_names.\s*:\s*\[([^\]]+)\]", source)
    if written:
        columns[IN_PLACE] = written[1].replace("'", "")
    size = re.search(r"kernel_num_gb.\s*:\s*([0-9.eE+-]+)", source)
    if size:
        columns["kernel_args_num_gb"] = float(size[1])
    function = _jitted(source)
    if function is None:
        return columns
    body = ast.get_source_segment(source, function) or ""
    columns["line_of_code"] = len(body.splitlines())
    columns["num_args"] = len(function.args.args)
    columns |= {name: body.count(pattern) for name, pattern in _COUNTED.items()}
    for name in ("xnumel", "ynumel", "rnumel"):
        numel = _numel(body, name)
        if numel is not None:
            columns[name] = numel
    return columns


def _numel(body: str, name: str) -> int | None:
    """Return a size that is written into the code; newer reductions have `r0_numel` for `rnumel`."""
    names = [name] if name != "rnumel" else ["rnumel", "r0_numel", "r1_numel"]
    sizes = [int(match[1]) for one in names if (match := re.search(rf"\b{one} = (\d+)", body))]
    return math.prod(sizes) if sizes else None


def _jitted(source: str) -> ast.FunctionDef | None:
    try:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return None
    jitted = [
        function for function in functions if any("triton.jit" in ast.unparse(word) for word in function.decorator_list)
    ]
    # Helpers of a template come before the kernel.
    return jitted[-1] if jitted else None


def _definition(node: ast.stmt) -> tuple[str, str, str] | None:
    """Return name, language and source of `NAME = async_compile.LANGUAGE(..., '''SOURCE''', ...)`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return None
    call = node.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    if ast.unparse(call.func.value) != "async_compile":
        return None
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    language = call.func.attr.split("_")[0]
    return (node.targets[0].id, language, max(texts, key=len)) if texts else None


def _called(tree: ast.Module) -> Iterator[str]:
    """Yield what a call of the file calls, in order; `NAME.run(...)` is a call of NAME."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _BESIDE.search(node.name):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                name = ast.unparse(inner.func)
                yield name.removesuffix(".run")


@dataclass(frozen=True)
class Bandwidth:
    """Inductor's measurement of a kernel: milliseconds, 10^9 bytes, GB/s, and its share of the graph's time."""

    ms: float
    gb: float
    gb_per_s: float
    share: float


def read_bandwidth(text: str) -> dict[str, dict[str, Bandwidth]]:
    """Return Inductor's bandwidth profile by generated file and kernel; of several calls the first."""
    bandwidths: dict[str, dict[str, Bandwidth]] = {}
    rows: dict[str, Bandwidth] = {}
    for line in text.splitlines():
        section, row = _SECTION.match(line), _ROW.match(line)
        if section:
            rows = bandwidths.setdefault(section[1], {})
        elif row:
            ms, gb, rate, share, name = row.groups()
            rows.setdefault(name, Bandwidth(float(ms), float(gb), float(rate), float(share) / 100))
    return bandwidths


def row_of(
    direction: str, kernel: Generated, path: str, bandwidth: Bandwidth | None, counted: ProfiledKernel | None
) -> ProfiledKernel:
    """Return one kernel with all its known figures.

    `counted` is Nsight Compute's entry of the same kernel in the same pass; its sums are over the launches of a call.
    """
    figures: dict[str, float | str] = {**kernel.columns, "kernel_name": kernel.name, "kernel_path": path}
    if bandwidth is not None:
        figures |= {name: getattr(bandwidth, name) for name in BANDWIDTH}
    if counted is not None and counted.count:
        moved, rate = counted.figures.get("dram_bytes"), counted.figures.get("dram_gb_per_s")
        if counted.time_us is not None:
            figures["ncu_duration_us"] = counted.time_us / counted.count
        if isinstance(rate, float):
            figures["ncu_mem_bw_gbps"] = rate
        if isinstance(moved, float):
            figures["ncu_mem_accessed_gb"] = moved / counted.count / 1e9
    time_us = bandwidth.ms * 1e3 * kernel.calls if bandwidth is not None else None
    return ProfiledKernel(
        direction=direction, name=kernel.name, count=float(kernel.calls), time_us=time_us, figures=figures
    )


def table_csv(kernels: Sequence[ProfiledKernel]) -> str:
    """Return one row for each kernel: `pass`, `calls`, then the columns that any of them has."""
    known = {name for kernel in kernels for name in kernel.figures}
    shown = [name for name in (*COLUMNS, *BANDWIDTH, *NCU) if name in known]
    rows = ([one.direction, f"{one.count:g}", *map(one.figures.get, shown)] for one in kernels)
    return csv_text(["pass", "calls", *shown], rows)
