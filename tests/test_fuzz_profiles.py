"""Files of profilers, mutated: a reason, or figures that are finite. `make fuzz` tries ten thousand of each."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import attempt, contents, mutated

from attn_exp.core.profile import ProfiledKernel
from attn_exp.profilers.chrome import TraceError, read_trace
from attn_exp.profilers.figures_csv import kernels_csv
from attn_exp.profilers.hatchet import HatchetError, kernels_of, lines_of, rates, read_tree
from attn_exp.profilers.ncu_csv import CsvError, Launch, read_launches
from attn_exp.profilers.ncu_metrics import COUNTERS
from attn_exp.profilers.ncu_table import kernels, pass_figures, split_passes

HERE = Path(__file__).parent
TREE = (HERE / "profiles" / "tree.hatchet").read_bytes()
NCU = (HERE / "fixtures" / "ncu_raw.csv").read_bytes()
MARKER = "spin_kernel"


def gpu_trace() -> dict[str, Any]:
    """A trace of two calls of two kernels each; the fixture is one of a CPU, and far larger."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    for call in range(2):
        begin = 1000.0 * call
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": "attn_exp:forward", "ts": begin, "dur": 100, "tid": 1}
        )
        for index in range(2):
            number = 10 * call + index
            launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": begin + index, "dur": 1.5}
            kernel = {"cat": "kernel", "name": f"k{index}", "ts": begin + 50 + 20 * index, "dur": 10.0}
            figures = {"grid": [132, 1, 1], "registers per thread": 255, "est. achieved occupancy %": 12, "stream": 7}
            events.append({"ph": "X", "tid": 1, "args": {"correlation": number}, **launch})
            events.append({"ph": "X", "tid": 7, "args": {"correlation": number, **figures}, **kernel})
            events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": begin + 5 * index, "dur": 3, "tid": 1})
    return {"traceEvents": events}


TRACE = gpu_trace()


def sound(found: list[ProfiledKernel], metrics: dict[str, float]) -> bool:
    """Whether all figures are finite, no time is negative, and all can be kept in a record and as CSV."""
    numbers = [
        *metrics.values(),
        *(value for one in found for value in one.figures.values() if isinstance(value, float)),
    ]
    numbers += [value for one in found for value in (one.count, one.time_us) if value is not None]
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[ProfiledKernel]) == found
    assert kernels_csv(found).count("\n") >= len(found)
    return all(map(math.isfinite, numbers)) and all((one.time_us or 0.0) >= 0 for one in found)


def test_the_unchanged_ones_are_read(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(TRACE))
    (forward,) = read_trace(tmp_path / "trace.json", "cuda").values()
    assert [(one.name, one.count, one.time_us) for one in forward.kernels] == [("k0", 1.0, 10.0), ("k1", 1.0, 10.0)]
    assert (forward.time_us, forward.span_us, forward.gap_us) == (20.0, 30.0, 10.0)
    (operators,) = read_trace(tmp_path / "trace.json", "cpu").values()
    assert [(one.name, one.count, one.time_us) for one in operators.kernels] == [("aten::mm", 2.0, 6.0)]


@mutated()
@given(contents(TRACE, json.dumps(TRACE).encode()), st.sampled_from(["cuda", "cpu"]))
def test_a_mutated_trace_has_a_reason_or_finite_figures(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, device: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.json"
    path.write_bytes(content)
    passes, refusal = attempt(lambda: read_trace(path, device), TraceError)
    assert refusal is None or (str(path) in refusal and len(refusal) < 500)
    for name, one in (passes or {}).items():
        assert sound(list(one.kernels), one.metrics), name


@mutated()
@given(contents(json.loads(TREE), TREE))
def test_a_mutated_tree_has_a_reason_or_finite_figures(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.hatchet"
    path.write_bytes(content)

    def read(name: str) -> bool:
        root = read_tree(path)
        found, lines, metrics = kernels_of(root, name, 3), lines_of(root, name), rates(root, name)
        shares = [value for line in lines for value in (line.samples, line.share, line.stalled_share)]
        return sound(list(found), metrics) and all(map(math.isfinite, shares))

    for name in ("forward", "backward"):
        right, refusal = attempt(lambda name=name: read(name), HatchetError)
        assert right or ((str(path) in refusal or "has no scope" in refusal) and len(refusal) < 500)


@mutated()
@given(contents(None, NCU) | contents([NCU.decode()], NCU))
def test_a_mutated_table_of_ncu_has_a_reason_or_finite_figures(content: bytes) -> None:

    def read() -> dict[str, list[Launch]]:
        return split_passes(read_launches(content.decode(errors="replace")), ("forward", "backward"), MARKER)

    by_pass, refusal = attempt(read, CsvError)
    assert refusal is None or 0 < len(refusal) < 500
    for name, own in (by_pass or {}).items():
        assert sound(kernels(own, name, COUNTERS), pass_figures(own, name, COUNTERS))


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text",
    [DEEP, f'{{"traceEvents": {DEEP}}}', "9" * 5000, '{"traceEvents": [1, "a", null, [], {}]}', "NaN", "\ufeff{}"]
    + [
        json.dumps({"traceEvents": [{**event, key: value} for event in TRACE["traceEvents"]]})
        for key in ("name", "ts", "dur", "cat", "tid", "args")
        for value in (None, [], {}, "x", float("nan"), float("inf"), -1e300, [[1]], {"correlation": []}, True)
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_odd_traces_have_a_reason_or_finite_figures(tmp_path: Path, text: str, device: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    passes, refusal = attempt(lambda: read_trace(tmp_path / "trace.json", device), TraceError)
    assert refusal is None or "trace.json" in refusal
    for one in (passes or {}).values():
        assert sound(list(one.kernels), one.metrics)


@pytest.mark.parametrize("text", [DEEP, "9" * 5000, '[{"children": ' * 500 + "]", '{"a": 1}', "[1]", '["a"]', "null"])
def test_odd_trees_have_a_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / "tree.hatchet").write_text(text)
    with pytest.raises(HatchetError, match=r"tree\.hatchet is no hatchet tree"):
        read_tree(tmp_path / "tree.hatchet")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, 1e300, "5", None, [], True])
def test_a_tree_s_numbers_are_numbers(tmp_path: Path, value: object) -> None:
    leaf = {"frame": {"name": "k"}, "children": [], "metrics": {"time (ns)": value, "count": 1, "device": "0"}}
    scope = {"frame": {"name": "forward"}, "children": [leaf], "metrics": {}}
    (tmp_path / "tree.hatchet").write_text(
        json.dumps([{"frame": {"name": "ROOT"}, "children": [scope], "metrics": {}}])
    )
    with pytest.raises(HatchetError, match=r"time \(ns\) of k is "):
        read_tree(tmp_path / "tree.hatchet")


@pytest.mark.parametrize(
    "text",
    ["", "\0", '"' * 200_000, "a,b\n1,2", "Kernel Name\n", "Kernel Name,a__b\nk", "Kernel Name,a__b\nk,1e300",
     "Kernel Name,a__b\nk,-5", "Kernel Name,a__b\n,usecond\nk,1e308", "Kernel Name," + "x" * 200_000],
)  # fmt: skip
def test_odd_tables_of_ncu_have_a_reason_or_no_launch(text: str) -> None:
    launches, refusal = attempt(lambda: read_launches(text), CsvError)
    assert launches == [] or (refusal is not None and "ncu" in refusal)
