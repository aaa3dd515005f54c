from dataclasses import replace

import pytest
import sweeps

from attn_exp.core.record.profile import Profile
from attn_exp.core.record.roofline import roof_metrics, roof_of
from attn_exp.tracking.base import metrics, tags

# FLOP/s and bytes/s, as an H200 reaches them: the ridge lies at 180 FLOP per byte.
CEILINGS = {"matmul_flops_per_s": 720e12, "copy_bytes_per_s": 4e12}


def job(tflops, gigabytes=0.2, us=1000.0, flags=(), event_us=None, counted=None, **more):
    """A job whose forward runs at so many TFLOPS for `us`, and must move so many 10^9 bytes; `counted` by ncu."""
    record = sweeps.job("flash", us, None, **more)
    own = {"forward/tflops": tflops, "forward/min_bytes": gigabytes * 1e9}
    own |= {"forward/event_time_us": event_us} if event_us else {}
    profiles = {}
    if counted is not None:
        profiles["ncu"] = Profile(status="ok", metrics={"forward/dram_bytes": counted * 1e9})
    return replace(record, metrics=record.metrics | own, ceilings=CEILINGS, flags=tuple(flags), profiles=profiles)


@pytest.mark.parametrize(
    ("record", "bound"),
    [
        (job(600), "compute"),
        (job(440, gigabytes=0.2), "compute"),
        (job(430, gigabytes=0.2), "latency"),
        (job(100, gigabytes=3.0), "memory"),
        (job(100, gigabytes=0.2), "latency"),
        # What DRAM moved decides, where it was counted.
        (job(100, gigabytes=0.2, counted=3.0), "memory"),
        (job(600, counted=2.0), "compute"),
        (job(5, us=10.0, gigabytes=0.001, flags=["launch_bound"], event_us=30.0), "launch"),
        # The flag is of the other pass.
        (job(100, us=1000.0, flags=["launch_bound"], event_us=1001.0), "latency"),
        # Whoever is near the roof while it runs is not bound by launches, however long those take.
        (job(600, flags=["launch_bound"], event_us=2000.0), "compute"),
    ],
)  # fmt: skip
def test_memory_or_compute_bounds_a_pass(record, bound):
    roof = roof_of(record, "forward")
    assert roof is not None and roof.bound == bound
    assert roof.sentence.startswith(f"forward is bound by {bound}: ")
    assert tags(record)["attn_exp.bound_forward"] == bound


def test_the_figures_of_a_roof():
    roof = roof_of(job(360, gigabytes=1.0), "forward")
    # 360e12 FLOP/s for 1 ms.
    assert roof.intensity == pytest.approx(360)
    assert roof.roof == 720e12
    assert (roof.of_compute, roof.of_memory, roof.of_roof) == pytest.approx((0.5, 0.25, 0.5))
    below = roof_of(job(90, gigabytes=1.0), "forward")
    assert below.roof == pytest.approx(90 * 4e12)
    assert below.of_roof == pytest.approx(0.25)
    assert "compulsory bytes" in below.sentence and "profiler=ncu measures" in below.sentence
    counted = roof_of(job(90, gigabytes=1.0, counted=2.0), "forward")
    assert counted.intensity == pytest.approx(45)
    assert "counted bytes" in counted.sentence and "profiler=ncu" not in counted.sentence


def test_a_call_above_the_measured_ceiling_has_no_share():
    assert "%" not in roof_of(job(32 * 720), "forward").sentence
    assert "%" not in roof_of(job(100, gigabytes=5.0), "forward").sentence
    assert "104 %" in roof_of(job(1.04 * 720), "forward").sentence


def test_every_job_has_its_roofline_in_mlflow_and_none_in_its_metrics():
    record = job(90, gigabytes=1.0)
    kept = {name: value for name, value in metrics(record).items() if name.startswith("roofline/")}
    assert kept == roof_metrics(record)
    assert kept["roofline/forward/flop_per_byte"] == pytest.approx(90)
    assert kept["roofline/forward/roof_tflops"] == pytest.approx(360)
    assert not any(name.startswith("roofline") for name in record.metrics)
    counted = roof_metrics(job(90, gigabytes=1.0, counted=2.0))
    assert counted["roofline/forward/flop_per_dram_byte"] == pytest.approx(45)
    assert counted["roofline/forward/flop_per_byte"] == pytest.approx(90), "the compulsory bytes stay beside them"
