import csv
import io
import math
from dataclasses import replace

import pytest
import sweeps
from fakes import make_timing
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases

from attn_exp import compare
from attn_exp.core.case.case import Case
from attn_exp.core.case.flops import compulsory_bytes, flops
from attn_exp.core.errors import UserError
from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.core.record.checked import TensorError
from attn_exp.core.record.limits import IMPLAUSIBLE_FACTOR, above_datasheet
from attn_exp.core.record.metrics import METRICS, metric, metric_named, pass_metrics
from attn_exp.core.record.record import PassRecord
from attn_exp.core.record.window import Window
from attn_exp.results.cell import cells_of, metric_of
from attn_exp.results.result import result_of
from attn_exp.results.table import csv_text
from attn_exp.tracking.base import metrics as mlflow_metrics

# forward: 4 * 8 * 16 * 1024^2 * 128 FLOP and 4 * 8 * 16 * 1024 * 128 * 2 bytes
CASE = Case(batch=8, q_heads=16, kv_heads=16, q_len=1024, kv_len=1024, head_dim=128, value_dim=128, dtype="bfloat16")
FLOPS, BYTES = 68_719_476_736, 134_217_728
H200 = datasheet_peak("NVIDIA H200")
ERROR = TensorError(relative=1e-3, worst_row=2e-3, max_abs=0.5, tolerance=0.01)


def metrics(*timings, case=CASE, direction="forward", measured=None, **options):
    measured = replace(measured or PassRecord(), timings=timings or (make_timing((100.0,)),))
    return pass_metrics(case, direction, measured, **{"saves_lse": False, "ceilings": {}, "peak": None} | options)


def test_rates_follow_from_the_median():
    found = metrics(make_timing((90.0, 100.0, 300.0)))
    assert found["forward/time_us"] == 100.0
    assert found["forward/tflops"] == pytest.approx(FLOPS / 100e-6 / 1e12)
    assert found["forward/gb_per_s"] == pytest.approx(BYTES / 100e-6 / 1e9)
    assert found["forward/min_bytes"] == BYTES
    assert found["forward/tflops_sdpa_convention"] == pytest.approx(FLOPS * 257 / 256 / 100e-6 / 1e12)
    assert (found["forward/samples"], found["forward/rounds"]) == (3, 3)
    assert found["forward/outliers"] == 0.0, "a zero is known, not absent"


def test_shares_are_of_the_measured_and_of_the_datasheet_rate():
    ceilings = {"matmul_flops_per_s": 791e12, "copy_bytes_per_s": 4.27e12}
    found = metrics(make_timing((200.0,)), ceilings=ceilings, peak=H200)
    assert found["forward/flops_of_measured"] == pytest.approx(FLOPS / 200e-6 / 791e12)
    assert found["forward/bandwidth_of_measured"] == pytest.approx(BYTES / 200e-6 / 4.27e12)
    assert found["forward/flops_of_peak"] == pytest.approx(FLOPS / 200e-6 / 989.4e12)
    assert found["forward/bandwidth_of_peak"] == pytest.approx(BYTES / 200e-6 / 4.8e12)


def test_an_unknown_metric_is_absent():
    found = metrics(make_timing((100.0, 100.0), rounds=(0, 0)))
    absent = {"time_low_us", "time_half_width", "flops_of_peak", "bandwidth_of_measured", "peak_memory_bytes"}
    assert not {f"forward/{name}" for name in absent | {"first_call_s"}} & set(found)


def test_second_opinions_memory_first_call_and_errors_have_names_of_their_own():
    found = metrics(
        make_timing((100.0,)),
        make_timing((90.0, 92.0), timer="kernel"),
        make_timing((120.0,), timer="event"),
        direction="backward",
        measured=PassRecord(
            errors={"dq": ERROR, "dv": replace(ERROR, max_abs=None)}, first_call_s=1.5, peak_memory_bytes=7
        ),
    )
    expected = {"kernel_time_us": 91.0, "event_time_us": 120.0, "error_dq": 1e-3, "error_dq_worst_row": 2e-3,
                "error_dq_max_abs": 0.5, "first_call_s": 1.5, "peak_memory_bytes": 7.0}  # fmt: skip
    assert expected.items() <= {name.removeprefix("backward/"): value for name, value in found.items()}.items()
    assert "backward/error_dv_max_abs" not in found
    assert "backward/device_time_us" not in found
    assert found["backward/launch_share"] == pytest.approx(1 - 100 / 120)
    # A loop of calls may take less than the calls one by one.
    assert metrics(make_timing((100.0,)), make_timing((99.0,), timer="event"))["forward/launch_share"] == 0.0


@given(cases(), st.lists(st.floats(0.1, 1e6), min_size=1, max_size=12), st.sampled_from(["forward", "backward"]))
def test_every_metric_is_a_finite_float_under_its_pass(case, times, direction):
    found = metrics(make_timing(times), case=case, direction=direction, peak=H200)
    assert all(type(value) is float and abs(value) < float("inf") for value in found.values())
    assert all(name.startswith(f"{direction}/") for name in found)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rate_above_the_datasheet_is_implausible_and_one_at_its_margin_is_not(direction):
    fastest_us = flops(CASE, direction) / (989.4e12 * IMPLAUSIBLE_FACTOR) * 1e6
    assert above_datasheet(CASE, direction, make_timing((fastest_us * 1.0001,)), H200) is None
    said = above_datasheet(CASE, direction, make_timing((fastest_us * 0.98,)), H200)
    assert said == f"{direction}: 1,030 TFLOP/s is above the H200 SXM's peak of 989"


DECODE = Case(batch=64, q_heads=8, kv_heads=8, q_len=1, kv_len=8192, head_dim=128, value_dim=128, dtype="bfloat16")


def test_a_bandwidth_above_the_datasheet_is_implausible_unless_caches_are_warm():
    fastest_us = compulsory_bytes(DECODE, "forward", saves_lse=False) / (4.8e12 * IMPLAUSIBLE_FACTOR) * 1e6
    assert above_datasheet(DECODE, "forward", make_timing((fastest_us * 1.0001,)), H200) is None
    said = above_datasheet(DECODE, "forward", make_timing((fastest_us * 0.9,)), H200)
    assert said == "forward: 5.4 TB/s is above the H200 SXM's peak of 4.8"
    assert above_datasheet(DECODE, "forward", make_timing((fastest_us * 0.9,), l2="warm"), H200) is None


def test_a_metric_is_one_function_and_appears_everywhere(tmp_path):
    @metric("token/s", higher_is_better=True, follows_clock=True)
    def tokens_per_s(timed):
        """Tokens over the time."""
        return timed.case.batch * timed.case.q_len / timed.seconds

    try:
        found = metrics(make_timing((100.0,)))
        assert found["forward/tokens_per_s"] == pytest.approx(8 * 1024 / 100e-6)
        records = [
            replace(job, metrics=job.metrics | {"forward/tokens_per_s": rate})
            for job, rate in ((sweeps.job("flash", 100.0, None), 1e6), (sweeps.job("cudnn", 100.0, None), 2e6))
        ]
        sweep = sweeps.sweep(tmp_path / "s", records)
        assert [row["forward/tokens_per_s"] for row in csv.DictReader(io.StringIO(csv_text(sweep.results)))] == [
            "2e+06",
            "1e+06",
        ]
        assert mlflow_metrics(records[0])["forward/tokens_per_s"] == 1e6
        best = [row.cell.result.label for row in compare(sweep, metric="tokens_per_s").rows if row.best]
        assert best == ["cudnn"]
    finally:
        METRICS.pop("tokens_per_s", None)
        metric_named.cache_clear()


WINDOW = Window(source="nvml", call_share=0.9, clock_mhz=1700.0, power_w=600.0, power_error=0.02, energy_from="counter")


def test_joules_and_tflops_per_watt_follow_from_the_mean_power():
    found = metrics(make_timing((90.0, 100.0, 110.0)), measured=PassRecord(window=WINDOW, workspace_bytes=0))
    assert found["forward/joules_per_call"] == pytest.approx(600 * 100e-6)
    assert found["forward/tflops_per_watt"] == pytest.approx(FLOPS / (600 * 100e-6) / 1e12)
    assert (found["forward/power_w"], found["forward/power_error"], found["forward/clock_mhz"]) == (600.0, 0.02, 1700.0)
    assert found["forward/workspace_bytes"] == 0.0, "no workspace is known, not absent"


@pytest.mark.parametrize(
    ("window", "timer"), [(replace(WINDOW, call_share=0.4), "device"), (WINDOW, "dispatch"), (Window(), "device")]
)
def test_power_that_is_mostly_of_other_things_is_no_calls_energy(window, timer):
    found = metrics(make_timing((100.0,), timer=timer), measured=PassRecord(window=window))
    assert not {"forward/joules_per_call", "forward/tflops_per_watt"} & set(found)


def test_joules_are_compared_with_the_uncertainty_of_time_and_power():
    def half(word, **more):
        values = {"time_us": 100.0, "time_low_us": 99.0, "time_high_us": 101.0, "rounds": 9.0, "joules_per_call": 0.06}
        record = sweeps.job("flash", 100.0)
        own = {f"forward/{name}": value for name, value in (values | {"power_w": 600.0} | more).items()}
        results = [result_of(replace(record, metrics=record.metrics | own))]
        return next(cell for cell in cells_of(results, metric_of(word, results)) if cell.direction == "forward").half

    time_half = math.log(101 / 99) / 2
    assert half("time_us") == pytest.approx(time_half)
    assert half("joules", power_error=0.02) == pytest.approx(time_half + math.log(1.02))
    assert half("power_w", power_error=0.02) == pytest.approx(math.log(1.02))
    assert half("joules_per_call") is None


def test_the_words_that_a_metric_begins_with_are_enough_if_only_one_does():
    record = sweeps.job("flash", 100.0)
    results = [result_of(replace(record, metrics=record.metrics | {"forward/joules_per_call": 0.06}))]
    assert metric_of("joules", results).name == "joules_per_call"
    assert str(metric_of("forward/joules_per", results)) == "forward/joules_per_call"
    for word in ("joule", "", "speed", "time"):
        with pytest.raises(UserError, match="there is no metric"):
            metric_of(word, results)
    for word, words in (("power_w", "no row has power_w"), ("workspace", "workspace_b")):
        with pytest.raises(UserError, match=words):
            metric_of(word, results)
