"""Inductor's profile on a GPU: kernels in Triton with all of PyTorch's columns, and Nsight Compute's beside them."""

import csv

import pytest
from cli import records, run

pytestmark = pytest.mark.gpu
SMALL = ("dtype=bf16", "tracker=none", "sweep=a", "batch=1", "seq_len=1024")
WANTED = {"kernel_name", "kernel_path", "kernel_category", "size_hints", "line_of_code", "num_load", "num_store"}
WANTED |= {"num_for_loop", "num_atomic_add", "num_args", "kernel_args_num_gb", "ms", "gb", "gb_per_s", "share"}


def profiled(tmp_path, *arguments):
    done = run(*arguments, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = records(tmp_path, "a").values()
    assert (record.status, record.reason) == ("ok", None)
    job = tmp_path / "multirun" / "a" / record.request.job
    assert not list(tmp_path.glob("metric_table*")) and not list(tmp_path.glob("torch_compile_debug*"))
    return record, job


@pytest.mark.alone
def test_every_generated_kernel_has_its_columns_and_its_bandwidth(tmp_path):
    arguments = ("backend=cudnn", "compile=default", "model=llama3_8b", "workload=decoder_layer", "align=top_left")
    record, job = profiled(tmp_path, *arguments, "profiler=[inductor,ncu]")
    found = record.profiles["inductor"]
    assert (found.status, found.reason) == ("ok", None), found
    rows = list(csv.DictReader((job / "profiles" / "inductor" / "kernels.csv").read_text().splitlines()))
    assert set(rows[0]) >= WANTED
    assert {row["pass"] for row in rows} == {"forward", "backward"}
    for row in rows:
        assert row["kernel_name"].startswith("triton_")
        source = (job / "profiles" / "inductor" / row["kernel_path"]).read_text()
        assert "@triton.jit" in source and "get_args" in source, "a file that runs on its own"
        assert float(row["gb_per_s"]) > 0 and int(row["num_load"]) > 0
    assert "torch.ops.aten" in (job / "profiles" / "inductor" / "graphs" / "backward_aten.py").read_text()
    if record.profiles["ncu"].status == "ok":
        joined = [row for row in rows if row["ncu_duration_us"]]
        assert len(joined) == len(rows), [row["kernel_name"] for row in rows if not row["ncu_duration_us"]]
        assert all(float(row["ncu_mem_accessed_gb"]) > 0 and float(row["ncu_mem_bw_gbps"]) > 0 for row in joined)


@pytest.mark.parametrize(
    "arguments", [("backend=flex",), ("backend=eager", "compile=reduce-overhead", "passes=[forward]")]
)
def test_templates_and_cuda_graphs_are_shown_too(tmp_path, arguments):
    record, _ = profiled(tmp_path, *arguments, "profiler=inductor")
    found = record.profiles["inductor"]
    assert (found.status, found.reason) == ("ok", None), found
    assert [kernel for kernel in found.kernels if kernel.name.startswith("triton_")]
