"""Inductor's profile: a real compilation on the CPU, and what is read of code that only a GPU would run."""

import csv
from dataclasses import replace

import pytest
from fakes import CASE, make_record, make_request

from attn_exp.backends.eager import Eager
from attn_exp.backends.package import Unavailable
from attn_exp.config.request import chosen_profilers
from attn_exp.core.record.profile import Profile, ProfiledKernel
from attn_exp.core.record.record import CompileRecord
from attn_exp.core.record.request import Compile
from attn_exp.profilers.base import Subject
from attn_exp.profilers.inductor import Inductor, as_timed
from attn_exp.profilers.inductor_code import read_generated

EAGER = {"_target_": "attn_exp.backends.eager.Eager", "name": "eager"}
# As torch 2.11 writes it for a GPU, shortened.
POINTWISE = """
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
@triton_heuristics.pointwise(
    size_hints={'x': 2097152},
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*bf16', 'xnumel': 'i32'}},
    inductor_meta={'kernel_name': 'triton_poi_fused_gelu_0', 'mutated_arg_names': [], 'kernel_num_gb': 0.008388608},
    min_elem_per_thread=0
)
@triton.jit
def triton_poi_fused_gelu_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 2097152
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    tmp0 = tl.load(in_ptr0 + (xindex), None).to(tl.float32)
    tl.store(out_ptr0 + (xindex), tmp0 * 0.5, None)


def get_args():
    return 1
"""
REDUCTION = """
@triton_heuristics.reduction(
    size_hints={'x': 512, 'r0_': 1024},
    reduction_hint=ReductionHint.INNER,
    filename=__file__,
    inductor_meta={'kernel_name': 'triton_red_fused_norm_1', 'mutated_arg_names': ['in_out_ptr0', 'out_ptr0']},
)
@triton.jit
def triton_red_fused_norm_1(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    xnumel = 512
    r0_numel = 1024
    for r0_offset in range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + r0_offset)
    tl.atomic_add(out_ptr0, tmp0)
"""
OUTPUT = f"""
# AOT ID: ['0_forward']
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()

# kernel path: /tmp/torchinductor_x/ab/cab.py
triton_poi_fused_gelu_0 = async_compile.triton('triton_poi_fused_gelu_0', '''{POINTWISE}''', device_str='cuda')
triton_red_fused_norm_1 = async_compile.triton('triton_red_fused_norm_1', '''{REDUCTION}''', device_str='cuda')

async_compile.wait(globals())
del async_compile

class JobQueue:
    def call(self, args):
        extern_kernels.mm(arg0, arg1, out=buf0)
        stream0 = get_raw_stream(0)
        triton_poi_fused_gelu_0.run(buf0, buf1, 2097152, stream=stream0)
        extern_kernels.mm(buf1, arg2, out=buf2)
        triton_poi_fused_gelu_0.run(buf2, buf3, 2097152, stream=stream0)
        triton_red_fused_norm_1.run(buf3, buf4, 512, 1024, stream=stream0)
        return (buf4,)

def benchmark_compiled_module(times=10, repeat=10):
    triton_red_fused_norm_1.run(1)
"""
# As `end_graph` of torch/_inductor/runtime/triton_heuristics.py writes it.
BANDWIDTH = """====================
TRITON KERNELS BANDWIDTH INFO (/tmp/torchinductor_x/ab/cab.py)
0.020ms    \t0.008 GB \t  419.43GB/s \t 50.00% \t triton_poi_fused_gelu_0
0.010ms    \t0.001 GB \t  104.86GB/s \t 33.33% \t triton_red_fused_norm_1
SUMMARY (/tmp/torchinductor_x/ab/cab.py)
0.03ms   \t 0.01 GB\t 314.57GB/s

====================
TRITON KERNELS BANDWIDTH INFO (/tmp/torchinductor_x/ab/cab.py)
0.999ms    \t0.008 GB \t  419.43GB/s \t 66.67% \t triton_poi_fused_gelu_0
"""


def subject_of(folder, request, compiled, profiles=()):
    place = folder / "profiles" / "inductor"
    place.mkdir(parents=True)
    record = make_record(request=request, compiled=compiled, profiles=dict(profiles))
    return Subject(record, Eager("e"), {}, None, None, folder, place)


def test_a_compiled_job_shows_its_kernels_sources_and_graphs(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    request = replace(make_request(EAGER, CASE), compile=Compile(mode="default"))
    subject = subject_of(tmp_path / "job", request, CompileRecord(graphs=1, breaks={}, recompilations=0))
    found = Inductor("inductor").profile(subject)
    assert (found.status, found.reason) == ("ok", None)
    generated = [kernel for kernel in found.kernels if kernel.name.startswith("cpp_fused")]
    assert {kernel.direction for kernel in generated} == {"forward", "backward"}
    assert all(kernel.count >= 1 and kernel.figures["line_of_code"] > 5 for kernel in generated)
    assert not {"num_load", "gb", "ncu_duration_us"} & set(generated[0].figures), "what the CPU's kernels have not"
    assert {kernel.name for kernel in found.kernels} > {"extern_kernels.bmm"}
    assert found.metrics["forward/graphs"] == found.metrics["backward/graphs"] == 1
    assert found.metrics["forward/external_calls"] == 2

    for name in found.files:
        assert (subject.job / name).stat().st_size > 0, name
    texts = {name.removeprefix("profiles/inductor/"): (subject.job / name).read_text() for name in found.files}
    assert "torch.ops.aten.bmm" in texts["graphs/forward_aten.py"]
    assert "torch.ops.aten.bmm" in texts["graphs/backward_aten.py"]
    assert "def call(" in texts["graphs/forward_code.py"]
    assert texts["graphs/forward_aten.py"] != texts["graphs/backward_aten.py"]
    for kernel in generated:
        assert 'extern "C"' in texts[kernel.figures["kernel_path"]]
    rows = list(csv.DictReader(texts["kernels.csv"].splitlines()))
    assert [row["kernel_name"] for row in rows] == [kernel.name for kernel in generated]
    assert set(rows[0]) == {"pass", "calls", "kernel_name", "kernel_path", "kernel_category", "line_of_code"}

    assert list(here.iterdir()) == [], "nothing leaks into the current folder"
    left = {path.name for path in subject.folder.iterdir()}
    assert left == {"kernels.csv", "worker.log", "sources", "graphs"}


def test_a_job_that_compiled_nothing_says_how_it_would(tmp_path):
    with pytest.raises(Unavailable, match="set compile=default, or choose backend=flex"):
        Inductor("inductor").profile(subject_of(tmp_path / "job", make_request(), None))


def test_a_compilation_that_fails_the_second_time_is_said_and_leaves_its_log(tmp_path):
    gone = {"_target_": "no_such_module.Backend", "name": "gone"}
    request = replace(make_request(gone), compile=Compile(mode="default"))
    compiled = CompileRecord(graphs=1, breaks={}, recompilations=0)
    subject = subject_of(tmp_path / "job", request, compiled)
    found = Inductor("inductor").profile(subject)
    assert found.status == "failed"
    assert "exited with code 1" in found.reason and "no_such_module" in found.reason
    assert found.files == ("profiles/inductor/worker.log",)
    assert not (subject.folder / "scratch").exists()


def test_the_kernels_of_a_gpu_are_read_from_their_code():
    (gelu, norm), external = read_generated(OUTPUT)
    assert external == {"extern_kernels.mm": 2}
    assert (gelu.name, gelu.language, gelu.calls, gelu.file_name) == (
        "triton_poi_fused_gelu_0",
        "triton",
        2,
        "triton_poi_fused_gelu_0.py",
    )
    assert gelu.source == POINTWISE
    assert gelu.columns == {
        "kernel_name": "triton_poi_fused_gelu_0",
        "kernel_category": "pointwise",
        "size_hints": "{'x': 2097152}",
        "line_of_code": 6,
        "num_load": 1,
        "num_store": 1,
        "num_for_loop": 0,
        "num_atomic_add": 0,
        "num_args": 4,
        "xnumel": 2097152,
        "kernel_args_num_gb": 0.008388608,
    }
    assert norm.calls == 1, "what only benchmarks call is not called"
    own = {name: norm.columns[name] for name in ("kernel_category", "reduction_hint", "num_for_loop", "num_atomic_add")}
    assert own == {"kernel_category": "reduction", "reduction_hint": "INNER", "num_for_loop": 1, "num_atomic_add": 1}
    assert norm.columns["rnumel"] == 1024
    assert norm.columns["mutated_arg_names"] == "in_out_ptr0, out_ptr0"


@pytest.mark.parametrize("refused", [False, True], ids=["bandwidth", "no bandwidth"])
def test_a_job_of_a_gpu_joins_its_kernels_with_bandwidth_and_counters(tmp_path, monkeypatch, refused):
    request = replace(make_request(EAGER, CASE), device="cuda")
    figures = {"dram_bytes": 1.6e7, "dram_gb_per_s": 533.0}
    name = "triton_poi_fused_gelu_0"
    counted = ProfiledKernel(direction="forward", name=name, count=2.0, time_us=30.0, figures=figures)
    ncu = Profile(status="ok", kernels=(counted,))
    compiled = CompileRecord(graphs=1, breaks={}, recompilations=0)
    subject = subject_of(tmp_path / "job", request, compiled, {"ncu": ncu})

    def as_on_a_gpu(request, scratch, log, *, with_bandwidth):
        if refused and with_bandwidth:
            (scratch / "half").write_text("")
            log.write_text("why not")
            return "compiling it again exited with code 1: no"
        assert not (scratch / "half").exists()
        for number, direction in enumerate(("forward", "forward", "backward")):
            folder = scratch / f"torch_compile_debug/run_1/torchinductor/model__{number}_{direction}_{number}.{number}"
            folder.mkdir(parents=True)
            (folder / "output_code.py").write_text(OUTPUT.replace("0_forward", f"{number}_{direction}"))
        file = scratch / "cached.py"
        file.write_text(OUTPUT.replace("0_forward", "2_backward"))
        if with_bandwidth:
            (scratch / "bandwidth.txt").write_text(BANDWIDTH.replace("/tmp/torchinductor_x/ab/cab.py", str(file)))
        return None

    monkeypatch.setattr("attn_exp.profilers.inductor.compile_again", as_on_a_gpu)
    found = Inductor("inductor").profile(subject)
    assert found.status == "ok"
    uncounted = "ncu counted no triton_red_fused_norm_1, triton_poi_fused_gelu_0"
    unprofiled = "no bandwidth profile: compiling it again exited with code 1: no; "
    assert found.reason == f"{unprofiled if refused else ''}{uncounted}"
    assert ("profiles/inductor/bandwidth.log" in found.files) == refused, "its log is not written over"
    assert found.metrics["forward/graphs"] == 2 and found.metrics["backward/kernels"] == 2
    assert found.metrics["forward/kernel_args_num_gb"] == pytest.approx(2 * 2 * 0.008388608), "two graphs, two launches"
    forward, again, backward = (one for one in found.kernels if one.name == name)
    assert forward.figures["ncu_duration_us"] == 15.0 and "ncu_duration_us" not in backward.figures
    assert again.figures["kernel_path"] == f"sources/forward_1/{name}.py"
    assert backward.time_us == (None if refused else pytest.approx(40.0))
    assert forward.time_us is None, "another graph's kernel of the same name is not this one"


def test_kernels_have_the_names_that_they_were_timed_under_where_one_is_several_here():
    generated = ["triton_red_sum_0", "triton_poi_mul_1", "triton_poi_mul_2", "triton_poi_add_3", "triton_poi_add_10"]
    timed = ["triton_poi_add_9", "triton_poi_add_2", "triton_poi_mul_1", "cudnn_generated_sdpa", "triton_red_sum_0"]
    assert as_timed(generated, timed) == {
        "triton_red_sum_0": "triton_red_sum_0",
        "triton_poi_mul_1": "triton_poi_mul_1",
        "triton_poi_mul_2": "triton_poi_mul_1",
        "triton_poi_add_3": "triton_poi_add_2",
        "triton_poi_add_10": "triton_poi_add_9",
    }
    assert as_timed(["cpp_fused_0"], []) == {"cpp_fused_0": "cpp_fused_0"}


def test_it_runs_after_the_profilers_that_it_joins():
    config = {"profiler": {name: {"_target_": "a.B"} for name in ("inductor", "ncu", "torch")}}
    assert [one["name"] for one in chosen_profilers(config)] == ["ncu", "torch", "inductor"]
