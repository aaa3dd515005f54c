"""Nsight Compute on a GPU, through the command line: what it counts agrees with what was timed."""

import pytest
from cli import left_behind, records, run

from attn_exp.backends.package import Unavailable
from attn_exp.profilers.ncu_program import find_program

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
CASE = ("model=sdpa_bench", "batch=4", "seq_len=2048", "causal=false", "dtype=bf16", "tracker=none", "sweep=a")


@pytest.fixture(scope="module", autouse=True)
def program():
    try:
        return find_program(None)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("backend", ["cudnn", "triton"])
def test_counters_agree_with_the_timing(tmp_path, backend):
    done = run(f"backend={backend}", "profiler=ncu", "profiler.ncu.report=true", *CASE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = records(tmp_path, "a")[backend]
    profile = record.profiles["ncu"]
    if profile.status == "unavailable":
        pytest.skip(profile.reason)
    assert (profile.status, profile.reason) == ("ok", None), profile
    at = profile.metrics
    for direction in ("forward", "backward"):
        timed = record.metrics[f"{direction}/kernel_time_us"]
        # Clocks are not locked: ncu's replay leaves the chip cooler than a sustained load does.
        assert at[f"{direction}/time_us"] == pytest.approx(timed, rel=0.25)
        least = record.metrics[f"{direction}/min_bytes"]
        assert 0.5 * least < at[f"{direction}/dram_bytes"] < 20 * least
        for share in ("sm_throughput", "tensor_active", "occupancy", "l2_hit_rate", "dram_throughput"):
            assert 0 <= at[f"{direction}/{share}"] <= 1.05, share
        names = {kernel.name for kernel in profile.kernels if kernel.direction == direction}
        seen = [kernel.name.split("(")[0] for kernel in record.passes[direction].kernels]
        assert any(one in name or name in one for one in seen for name in names), (seen, names)
        assert any(name.startswith(f"{direction}/stall_") for name in at)
    assert not [kernel.name for kernel in profile.kernels if "spin_kernel" in kernel.name]
    assert "profiles/ncu/report.ncu-rep" in profile.files
    assert left_behind(tmp_path) == []
    print(f"{backend}: {profile.seconds:.0f} s", {name: f"{value:.4g}" for name, value in sorted(at.items())})
