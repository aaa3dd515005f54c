"""A sweep's backends beside each other: gains, intervals, ties, means, picks, and what is never put together."""

import math
from dataclasses import replace

import pytest
import sweeps
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attn_exp import compare
from attn_exp.core.errors import UserError
from attn_exp.results.calibration import Calibration, write_calibration


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))


def rivals(tmp_path, records, **keys):
    return compare(sweeps.sweep(tmp_path / "s", records), **keys)


def by_label(found, direction="forward"):
    return {row.cell.result.label: row for row in found.rows if row.cell.direction == direction}


def test_no_mean_is_over_ways_that_are_never_compared(tmp_path):
    ways = [{}, {"measuring": {"regime": "burst"}}]
    records = [sweeps.job(name, us, **way) for way in ways for name, us in (("flash", 100.0), ("cudnn", 50.0))]
    found = compare(sweeps.write(tmp_path / "a", records), baseline="flash")
    assert found.by == ("regime",)
    forward = [mean for mean in found.means if mean.label == "cudnn" and mean.direction == "forward"]
    assert [(mean.n, mean.group) for mean in forward] == [(1, ("burst",)), (1, ("sustained",))]


def test_gains_are_over_the_baseline_with_both_rows_intervals_and_the_spread(tmp_path):
    found = rivals(tmp_path, [sweeps.job("flash", 100.0, half=0.004), sweeps.job("cudnn", 80.0, half=0.003)],
                   baseline="flash")  # fmt: skip
    rows = by_label(found)
    assert (rows["flash"].gain.value, rows["flash"].gain.p, rows["flash"].best) == (1.0, 1.0, False)
    gain = rows["cudnn"].gain
    half = math.hypot(math.log(1.004 / 0.996) / 2, math.log(1.003 / 0.997) / 2, math.log(1.01))
    assert gain.value == pytest.approx(1.25)
    assert (gain.low, gain.high) == pytest.approx((1.25 * math.exp(-half), 1.25 * math.exp(half)))
    assert gain.p < 1e-6 and rows["cudnn"].best


@pytest.mark.parametrize(("apart", "tied"), [(1.009, True), (1.02, False)])
def test_a_difference_below_the_spread_is_none(tmp_path, apart, tied):
    found = rivals(tmp_path, [sweeps.job("flash", 100.0, None), sweeps.job("cudnn", 100.0 * apart, None)])
    assert by_label(found)["cudnn"].best is tied
    assert bool(found.ties) is tied


def test_a_row_among_many_is_tied_unless_it_differs_by_more_than_the_best_of_equals_would(tmp_path):
    """1.2 % is a difference of two rows, but not of the best and the worst of nine."""
    pair = [sweeps.job("flash", 100.0, None, half=1e-6), sweeps.job("cudnn", 101.2, None, half=1e-6)]
    assert not by_label(rivals(tmp_path, pair))["cudnn"].best
    names = [f"other{index}" for index in range(7)]
    among = by_label(rivals(tmp_path, [*pair, *(sweeps.job(name, 100.5, None, half=1e-6) for name in names)]))
    assert among["cudnn"].best and all(among[name].best for name in names)
    # What is clearly worse makes no difference to the others.
    far = [sweeps.job(name, 150.0, None, half=1e-6) for name in names]
    assert not by_label(rivals(tmp_path, [*pair, *far]))["cudnn"].best


def test_the_doctors_delta_is_the_spread_of_its_machine(tmp_path):
    write_calibration(Calibration(device="GPU-1", margin=0.04))
    found = rivals(tmp_path, [sweeps.job("flash", 100.0), sweeps.job("cudnn", 103.0)])
    assert by_label(found)["cudnn"].best
    assert any("4.0 %" in note for note in found.notes)
    assert not by_label(rivals(tmp_path, [], spread=0.01))["cudnn"].best


def test_two_gpus_of_one_model_are_further_apart_and_it_is_said(tmp_path):
    other = sweeps.H200 | {"gpu_uuid": "GPU-2"}
    found = rivals(tmp_path, [sweeps.job("flash", 100.0), sweeps.job("cudnn", 102.0, environment=other)])
    assert by_label(found)["cudnn"].best
    assert "rivals of 2 cases ran on different GPUs of one model, which may differ by 2 %" in found.notes


@pytest.mark.parametrize(
    ("unlike", "column"),
    [
        ({"measuring": {"timer": "graph"}}, "timer"),
        ({"environment": sweeps.H200 | {"gpu": "NVIDIA H100"}}, "gpu"),
        ({"environment": sweeps.H200 | {"power_limit_w": 500.0}}, "power_limit_w"),
        ({"measuring": {"regime": "burst"}}, "regime"),
        ({"method_version": "1"}, "method_version"),
    ],
)
def test_unlike_rows_of_one_sweep_are_never_compared(tmp_path, unlike, column):
    found = rivals(tmp_path, [sweeps.job("flash", 100.0), sweeps.job("cudnn", 50.0, **unlike)], baseline="flash")
    rows = by_label(found)
    assert rows["cudnn"].gain is None and rows["cudnn"].best
    assert rows["cudnn"].group != rows["flash"].group
    # The table has a column that tells them apart.
    assert column in {one.head for one in found.table.columns}


def test_a_job_that_failed_stands_with_its_rivals_and_is_counted_where_it_is_missing(tmp_path):
    long = sweeps.case(seq_len=8192)
    records = [
        *(sweeps.job("flash", 100.0), sweeps.job("cudnn", 50.0), sweeps.failed(backend="math")),
        *(sweeps.failed("out_of_memory", "flash", of=long), sweeps.job("cudnn", 60.0, of=long)),
    ]
    found = rivals(tmp_path, records, baseline="flash")
    rows = by_label(found)
    assert rows["math"].gain is None and not rows["math"].best
    means = {(mean.label, mean.direction): mean for mean in found.means}
    assert (means["cudnn", "forward"].n, means["cudnn", "forward"].value) == (1, pytest.approx(2.0))
    assert [(means[label, "forward"].n, means[label, "forward"].cases) for label in ("cudnn", "math", "flash")] == [
        (1, 2), (0, 2), (1, 2),
    ]  # fmt: skip


def test_geometric_means_are_of_ratios_and_by_groups(tmp_path):
    records = []
    for dtype, gain in (("bfloat16", 2.0), ("float16", 8.0)):
        of = sweeps.case(dtype=dtype)
        records += [sweeps.job("math", 100.0, None, of=of), sweeps.job("flash", 100.0 / gain, None, of=of)]
    (mean,) = [one for one in rivals(tmp_path, records, baseline="math").means if one.label == "flash"]
    assert (mean.value, mean.least, mean.most, mean.n, mean.best) == pytest.approx((4.0, 2.0, 8.0, 2, 2))
    by = rivals(tmp_path, [], baseline="math", by="dtype").means
    assert {(one.group, one.label): one.value for one in by} == pytest.approx(
        {
            (("bfloat16",), "flash"): 2.0,
            (("bfloat16",), "math"): 1.0,
            (("float16",), "flash"): 8.0,
            (("float16",), "math"): 1.0,
        }
    )
    with pytest.raises(UserError, match="by= names an unknown field 'dtpe': did you mean 'dtype'"):
        rivals(tmp_path, [], by="dtpe")


def test_the_metric_is_a_choice_and_knows_its_better_side(tmp_path):
    records = [sweeps.job("flash", 100.0), sweeps.job("cudnn", 80.0)]
    rows = by_label(rivals(tmp_path, records, metric="tflops", baseline="flash"))
    assert rows["cudnn"].gain.value == pytest.approx(1.25) and rows["cudnn"].best
    rows = by_label(rivals(tmp_path, [], metric="kernel_time_us", baseline="flash"))
    assert rows["cudnn"].gain.value == pytest.approx(1.25) and rows["cudnn"].cell.half is None
    one = rivals(tmp_path, [], metric="backward/time_us")
    assert {row.cell.direction for row in one.rows} == {"backward"}
    with pytest.raises(UserError, match="there is no metric 'tflop': did you mean 'tflops'"):
        rivals(tmp_path, [], metric="tflop")
    with pytest.raises(UserError, match="there is no metric 'sideways/tflops'"):
        rivals(tmp_path, [], metric="sideways/tflops")


def test_a_metric_that_is_yes_or_no_has_no_winner(tmp_path):
    jobs = {name: sweeps.job(name, bwd_us=None) for name in ("flash", "cudnn", "math")}
    reads = {"flash": 0.0, "cudnn": 0.0, "math": 1.0}
    records = [
        replace(job, metrics=job.metrics | {"forward/reads_free_slots": reads[name]}) for name, job in jobs.items()
    ]
    found = rivals(tmp_path, records, metric="reads_free_slots")
    assert {row.label: row.best for row in found.rows} == {"flash": True, "cudnn": True, "math": False}
    assert not found.answer.headline()
    assert {text for row in found.table.rows for text in row} >= {"yes", "no"}
    assert "*" not in str(found.table.rows)


def test_a_job_that_was_measured_again_counts_once(tmp_path):
    first = sweeps.sweep(tmp_path / "a", [sweeps.job("flash", 100.0), sweeps.job("cudnn", 90.0)])
    again = sweeps.sweep(tmp_path / "b", [replace(sweeps.job("flash", 50.0), finished_at=sweeps.NOON + 99)])
    found = compare([first, again], metric="forward/time_us")
    assert {label: row.cell.value for label, row in by_label(found).items()} == {"flash": 50.0, "cudnn": 90.0}
    assert "1 cells were measured again later: the latest counts" in found.notes
    # Two sweeps are two sessions.
    assert by_label(found)["cudnn"].gain.spread == 0.022


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"baseline": "flsh"}, "there is no baseline=flsh: did you mean 'flash'"),
        ({"where": "batch > 99"}, "matches none"),
        ({"sort": "tflps"}, "sort= names an unknown field 'tflps': did you mean 'tflops'"),
        ({"spread": "nine"}, "is no percentage"),
        ({"basline": "flash"}, "there is no key 'basline': did you mean 'baseline'"),
    ],
)
def test_mistakes_are_sentences(tmp_path, keys, words):
    with pytest.raises(UserError, match=words):
        rivals(tmp_path, [sweeps.job()], **keys)


@settings(max_examples=60)
@example(times=[22256.0, 24156.0, 22548.0], half=0.046875)
@given(times=st.lists(st.floats(1.0, 1e5), min_size=2, max_size=6), half=st.floats(1e-4, 0.049))
def test_the_fastest_is_always_among_the_best_and_gains_multiply(tmp_path_factory, times, half):
    records = [sweeps.job(f"b{index}", us, None, half=half) for index, us in enumerate(times)]
    folder = tmp_path_factory.mktemp("p")
    found = compare(sweeps.sweep(folder / "s", records), baseline="b0")
    rows = by_label(found)
    assert rows[f"b{times.index(min(times))}"].best
    for index, us in enumerate(times):
        gain = rows[f"b{index}"].gain
        assert gain.value == pytest.approx(times[0] / us)
        assert gain.low <= gain.value <= gain.high
    best = min(times)
    for index, us in enumerate(times):
        # Among several, one has to be further behind than its own interval says: all pairs are accounted for.
        behind, several = math.log(us / best) / _half(half), len(times) > 2
        if us == best or behind <= 1:
            assert rows[f"b{index}"].best
        elif behind > (3 if several else 1):
            assert not rows[f"b{index}"].best


def _half(half):
    own = math.log((1 + half) / (1 - half)) / 2
    return math.hypot(own, own, math.log(1.01))
