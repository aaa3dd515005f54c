"""Second opinions: timers of one pass that contradict each other are found, those that time more are not."""

from dataclasses import replace

import numpy as np
import pytest
import sweeps
from fakes import make_timing

from attn_exp.core.record.record import Kernel, PassRecord
from attn_exp.core.record.timers import disagreements
from attn_exp.explain.page import job_page
from attn_exp.results.table import csv_text, table
from attn_exp.tracking.base import tags
from attn_exp.worker.secondary import calls_of_block


def rounds(us, timer="device"):
    return make_timing([us * factor for factor in (1.0, 1.001, 0.999, 1.0, 1.001, 0.999, 1.0)], timer=timer)


def block(us, timer="kernel", **more):
    return make_timing([us * factor for factor in (1.0, 1.002, 0.998, 1.0)], (0,) * 4, timer=timer, **more)


def named(*timings, launches=1.0):
    kernels = (Kernel(name="k", count=launches, time_us=1.0),)
    return [(pair.one, pair.other) for pair in disagreements(timings, kernels)]


def test_timers_that_agree_raise_nothing():
    assert named(rounds(1000.0), block(990.0), block(1001.0, "event")) == []


def test_a_kernel_time_beyond_the_device_time_is_named_and_so_is_every_timer_that_it_contradicts():
    found = disagreements((rounds(1000.0), block(1100.0), block(1002.0, "event")))
    assert [(pair.one, pair.other) for pair in found] == [("device", "kernel"), ("kernel", "event")]
    assert found[0].low < 0.1 < found[0].high
    assert str(found[0]).startswith("kernel has 1100 us and device 1000 us, 10.0 % more [+")


def test_gaps_between_kernels_are_no_contradiction_but_more_than_gaps_is():
    assert named(rounds(86.0), block(78.0), launches=5) == []
    assert named(rounds(86.0), block(78.0), launches=1) == [("device", "kernel")]
    assert named(rounds(1000.0), block(500.0)) == [("device", "kernel")]


def test_time_of_the_host_is_no_contradiction_but_less_than_the_gpus_time_is():
    assert named(rounds(20.0), block(90.0, "event"), block(500.0, "wall")) == []
    assert named(rounds(100.0), block(80.0, "event")) == [("device", "event")]
    assert named(rounds(5.0, "dispatch"), block(100.0)) == []


def test_kernels_on_several_streams_count_with_their_union():
    assert named(rounds(1000.0), block(1800.0, notes={"union_us": 990.0})) == []


def test_wide_intervals_leave_room():
    wild = make_timing([1000.0, 1200.0, 900.0, 1300.0], (0,) * 4, timer="kernel")
    assert named(rounds(1000.0), wild) == []


def test_equal_timers_are_hardly_ever_told_apart():
    """In 2,000 passes with 2 % of noise between the timers' moments and 1 % within; the floor is 5 %."""
    draw = np.random.default_rng(5)
    false = 0
    for _ in range(2000):
        device, kernel = 100.0 * np.exp(0.02 * draw.standard_normal(2))
        first = make_timing((device * np.exp(0.01 * draw.standard_normal(7))).tolist())
        other = make_timing((kernel * np.exp(0.01 * draw.standard_normal(8))).tolist(), (0,) * 8, timer="kernel")
        false += bool(disagreements((first, other)))
    assert false <= 10


def test_the_words_stand_where_readers_look(tmp_path):
    record = sweeps.job("flash", bwd_us=None)
    pair = disagreements((rounds(100.0), block(120.0)))
    passes = {"forward": replace(record.passes["forward"], disagreements=pair)}
    sweep = sweeps.sweep(tmp_path / "s", [replace(record, passes=passes, flags=("timers_disagree",))])
    words = "kernel has 120.0 us and device 100.0 us, 20.0 % more"
    (result,) = sweep.results
    assert f"forward: {words}" in result.second_opinions[0]
    assert words in " ".join(table([result]).split()) and words in csv_text([result])
    assert words in " ".join(job_page(result, [result]).split())
    assert words in tags(result.record())["attn_exp.timers_disagree_forward"]
    assert PassRecord().disagreements == ()


def test_compare_and_its_report_have_the_words(tmp_path):
    from attn_exp import compare
    from attn_exp.comparison.pages import page
    from attn_exp.core.sheet import FORMATS
    from attn_exp.core.sheet.render import text_of

    pair = disagreements((rounds(100.0), block(120.0)))
    records = [sweeps.job("flash", bwd_us=None), sweeps.job("cudnn", 90.0, bwd_us=None)]
    records[0] = replace(records[0], passes={"forward": replace(records[0].passes["forward"], disagreements=pair)})
    shown = page(compare(sweeps.sweep(tmp_path / "s", records)))
    for form in FORMATS:
        text = text_of(shown, form)
        assert "kernel has 120.0 us and device 100.0 us, 20.0 % more" in " ".join(text.split())


@pytest.mark.parametrize(
    ("timer", "call_us", "calls"),
    [("event", 10.0, 50), ("event", 1_500.0, 13), ("event", 42_000.0, 3), ("kernel", 10.0, 12)],
)
def test_a_block_of_long_calls_has_few(timer, call_us, calls):
    assert calls_of_block(timer, call_us) == calls
