"""Profilers on a GPU: CUPTI shared out, durations that agree, lines of our Triton kernels."""

import json

import pytest
from cli import records, run

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# Kernels above 100 us: batch 4, 16 heads of 128, 4,096 tokens, rested so that clocks are equal.
LARGE = (
    *("device=cuda", "model=sdpa_bench", "batch=4", "seq_len=4096", "dtype=bf16", "causal=false", "regime=burst"),
    *("stopping.budget_s=0.05", "tracker=none", "sweep=a"),
)
AGREE = 0.05


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Three jobs of one warm worker, each under both profilers, Proton after PyTorch's and before it."""
    folder = tmp_path_factory.mktemp("profiled")
    done = run("-m", "backend=cudnn,flash,triton", "profiler=[torch,proton]", *LARGE, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, records(folder, "a")


def test_proton_and_torch_both_work_beside_the_timing_of_one_warm_worker(profiled):
    _, found = profiled
    for name, record in found.items():
        assert record.status == "ok", record.reason
        statuses = {one: (profile.status, profile.reason) for one, profile in record.profiles.items()}
        assert {one: status for one, (status, _) in statuses.items()} == {"torch": "ok", "proton": "ok"}, statuses
        assert "profiler_lossy" not in record.flags, name
        for profile in record.profiles.values():
            for direction in ("forward", "backward"):
                assert any(kernel.direction == direction for kernel in profile.kernels)


def test_proton_torch_and_the_timing_agree_on_durations(profiled):
    _, found = profiled
    for name, record in found.items():
        for direction in ("forward", "backward"):
            timed = record.metrics[f"{direction}/kernel_time_us"]
            proton, torch = (record.profiles[one].metrics[f"{direction}/kernel_time_us"] for one in ("proton", "torch"))
            print(f"{name} {direction}: timing {timed:.1f}, torch {torch:.1f}, proton {proton:.1f} us")
            assert timed > 100
            assert torch == pytest.approx(timed, rel=AGREE), name
            assert proton == pytest.approx(torch, rel=AGREE), name


def test_kernels_have_their_launches_and_the_trace_its_ranges(profiled):
    folder, found = profiled
    record = found["cudnn"]
    longest = next(kernel for kernel in record.profiles["torch"].kernels if kernel.direction == "forward")
    assert {"grid", "block", "registers", "shared_memory_bytes"} <= set(longest.figures)
    assert record.profiles["torch"].metrics["forward/span_us"] >= longest.time_us
    trace = next(folder.glob("multirun/a/cudnn-*/profiles/torch/trace.json"))
    names = [event["name"] for event in json.loads(trace.read_bytes())["traceEvents"] if event.get("ph") == "X"]
    assert names.count("attn_exp:forward") >= 5


def test_lines_of_our_triton_kernels_or_the_reason_why_not(profiled):
    folder, found = profiled
    proton = found["triton"].profiles["proton"]
    print(proton.reason)
    if proton.reason is None:
        lines = next(folder.glob("multirun/a/triton-*/profiles/proton/lines.csv")).read_text().splitlines()
        for direction, file in (("forward", "forward_kernel.py"), ("backward", "backward_kernels.py")):
            assert any(line.startswith(direction) and file in line for line in lines), direction
    else:
        assert proton.reason.startswith("no figures by line: ")
    assert found["cudnn"].profiles["proton"].reason is None, "cuDNN's kernels have no lines to ask for"
