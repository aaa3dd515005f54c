"""Rows that were measured in turns compare by the ratio of their rounds; all others by their medians."""

import math
from dataclasses import replace

import pytest
import sweeps

from attn_exp import compare
from attn_exp.comparison.ratio import TURNS_FLOOR
from attn_exp.core.record.record import Paired, Timing
from attn_exp.results.result import result_of


def turned(record, base=None, log_ratio=0.0, half=0.0002, rounds=1000):
    """The record with its forward compared with that of another record, or with itself."""
    own = Paired(base=(base or record).request.job, log_ratio=log_ratio, half=half, rounds=rounds)
    return replace(record, passes=record.passes | {"forward": replace(record.passes["forward"], paired=own)})


def forward(name, us, **more):
    return sweeps.job(name, us, None, **more)


def two(log_ratio=0.004, **more):
    """Two rows with equal medians, of which `flash` takes 0.4 % longer in turns."""
    base = turned(forward("cudnn", 100.0))
    return [base, turned(forward("flash", 100.0), base, log_ratio, **more)]


def found_in(folder, records, **keys):
    return compare(sweeps.sweep(folder, records), **keys)


def gains(found):
    return {row.label: row.gain for row in found.rows}


def best(found):
    return sorted(row.label for row in found.rows if row.best)


def test_a_result_has_the_comparison_without_the_samples():
    timing = Timing(timer="device", l2="cold", times_us=(1.0,), rounds=(0,), stop_reason="precise")
    record = turned(forward("flash", 100.0), log_ratio=0.5)
    own = replace(record.passes["forward"].paired, timing=timing)
    record = replace(record, passes={"forward": replace(record.passes["forward"], paired=own)})
    assert result_of(record).paired == {"forward": replace(own, timing=None)}
    assert result_of(forward("flash", 100.0)).paired == {}


def test_rounds_decide_what_medians_leave_open(tmp_path):
    found = found_in(tmp_path / "s", two())
    flash = gains(found)["flash"]
    assert flash.value == pytest.approx(math.exp(-0.004))
    half = math.hypot(0.0002, math.log1p(TURNS_FLOOR))
    assert math.log(flash.high / flash.value) == pytest.approx(half, rel=1e-3)
    assert best(found) == ["cudnn"]
    assert "of rows measured in turns: their rounds' ratio (0.1 % and more)" in found.notes
    assert str(found.answer.lead) == "1.00 times as fast as flash [1.00, 1.01]" and found.answer.lead.low > 1.002


def test_no_number_of_rounds_tells_less_than_the_floor_apart(tmp_path):
    assert best(found_in(tmp_path / "s", two(0.0009, half=1e-6))) == ["cudnn", "flash"]


def test_the_faster_in_turns_is_the_best_though_its_median_is_higher(tmp_path):
    base = turned(forward("cudnn", 100.0))
    found = found_in(tmp_path / "s", [base, turned(forward("flash", 100.2), base, -0.01)])
    assert best(found) == ["flash"] and gains(found)["cudnn"].value == pytest.approx(math.exp(-0.01))


def test_chains_of_bases_add_up_and_shared_links_cancel(tmp_path):
    base = turned(forward("math", 100.0))
    middle = turned(forward("cudnn", 100.0), base, -0.10, half=0.02)
    one, other = (turned(forward(name, 100.0), middle, log) for name, log in (("flash", -0.02), ("triton", -0.05)))
    found = gains(found_in(tmp_path / "s", [base, middle, one, other]))
    assert found["flash"].value == pytest.approx(math.exp(-0.03))
    assert found["math"].value == pytest.approx(math.exp(-0.15))
    shared, whole = (math.log(found[name].high / found[name].value) for name in ("flash", "math"))
    assert shared == pytest.approx(math.hypot(0.0002, 0.0002, math.log1p(TURNS_FLOOR)), rel=1e-2)
    assert whole == pytest.approx(math.hypot(0.0002, 0.02, math.log1p(TURNS_FLOOR)), rel=1e-2)


def test_a_row_that_was_added_beside_one_that_was_measured_alone_compares_by_their_ratio(tmp_path):
    alone = forward("cudnn", 100.0)
    _, flash = two()
    found = found_in(tmp_path / "s", [alone, flash])
    assert gains(found)["flash"].value != 1.0 and best(found) != ["cudnn", "flash"]


def test_a_base_that_was_measured_again_later_is_none(tmp_path):
    base, flash = two()
    again = replace(base, started_at=flash.finished_at + 1, finished_at=flash.finished_at + 2)
    assert gains(found_in(tmp_path / "s", [again, flash]))["flash"].value == 1.0


@pytest.mark.parametrize("case", ["no end", "a circle", "one round", "spread", "memory", "sweeps"])
def test_everything_else_compares_by_medians(tmp_path, case):
    base, flash = two()
    keys = {}
    if case == "no end":
        base = turned(base, forward("math", 100.0))
    elif case == "a circle":
        base = turned(base, flash)
    elif case == "one round":
        flash = turned(flash, base, 0.004, rounds=1)
    elif case == "spread":
        keys["spread"] = 0.02
    elif case == "memory":
        keys["metric"] = "peak_memory_bytes"
    if case == "sweeps":
        # The later cudnn counts, and the chains of two sweeps do not meet.
        again = replace(base, finished_at=base.finished_at + 100)
        found = compare([sweeps.sweep(tmp_path / "a", [base, flash]), sweeps.sweep(tmp_path / "b", [again])])
    else:
        found = found_in(tmp_path / "s", [base, flash], **keys)
    assert gains(found)["flash"].value == 1.0 and best(found) == ["cudnn", "flash"]


def test_a_rate_of_the_time_compares_as_the_time(tmp_path):
    found = gains(found_in(tmp_path / "s", two(), metric="tflops"))
    assert found["flash"].value == pytest.approx(math.exp(-0.004)) and found["cudnn"].value == 1.0
