"""A sweep against an earlier one: the join, the verdicts, and what is refused."""

import math
import random
from dataclasses import replace

import pytest
import sweeps

from attn_exp import compare
from attn_exp.core.errors import UserError
from attn_exp.core.record.record import Kernel


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))


@pytest.fixture
def against(tmp_path):
    """Compares new records with old ones."""
    count = iter(range(1000))

    def run(old, new, **keys):
        index = next(count)
        return compare(
            sweeps.sweep(tmp_path / f"{index}" / "new", new), sweeps.sweep(tmp_path / f"{index}" / "old", old), **keys
        )

    return run


def verdicts(found):
    return {row.verdict for row in found.rows}


@pytest.mark.parametrize(
    ("new_us", "verdict"),
    [
        (100.0, "equivalent"),
        (100.5, "equivalent"),
        (102.0, "undecided"),
        (98.1, "undecided"),
        (110.0, "slower"),
        (90.0, "faster"),
    ],
)
def test_a_difference_counts_beyond_both_intervals_and_what_sessions_differ_by(against, new_us, verdict):
    found = against([sweeps.job(fwd_us=100.0, bwd_us=None)], [sweeps.job(fwd_us=new_us, bwd_us=None)])
    (row,) = found.rows
    assert row.verdict == verdict
    assert row.change == pytest.approx(new_us / 100.0 - 1)
    assert row.spread == 0.022
    assert row.low < row.change < row.high


@pytest.mark.parametrize("metric", ["time_us", "tflops"])
def test_two_rounds_that_differ_wildly_decide_nothing(against, metric):
    one = sweeps.job(bwd_us=None)
    wild = replace(one, metrics=one.metrics | {"forward/time_low_us": 1e-90, "forward/time_high_us": 1e90})
    found = against([one], [wild], metric=metric)
    assert verdicts(found) == {"undecided"}
    assert len(found.undecided(0.03)) == 1


def test_statuses_make_lost_fixed_failed_gone_and_new(against):
    names = ("lost", "fixed", "failed", "gone", "new", "both", "bad")
    lengths = {name: sweeps.case(seq_len=128 << index) for index, name in enumerate(names)}
    old = [
        sweeps.job(of=lengths["lost"]),
        sweeps.failed(of=lengths["fixed"]),
        sweeps.failed(of=lengths["failed"]),
        sweeps.job(of=lengths["gone"]),
        sweeps.job(of=lengths["both"]),
    ]
    new = [
        sweeps.failed("out_of_memory", of=lengths["lost"]),
        sweeps.job(of=lengths["fixed"]),
        sweeps.failed("error", of=lengths["failed"]),
        sweeps.job(of=lengths["new"]),
        sweeps.failed(of=lengths["bad"]),
        sweeps.job(of=lengths["both"]),
    ]
    found = against(old, new, metric="forward/time_us")
    by_case = {case: name for name, case in lengths.items()}
    assert {by_case[row.cell.result.case]: row.verdict for row in found.rows} == {
        "lost": "lost",
        "fixed": "fixed",
        "failed": "failed",
        "gone": "gone",
        "new": "new",
        "both": "equivalent",
        "bad": "failed",
    }
    assert found.counts == {"lost": 1, "fixed": 1, "gone": 1, "new": 1, "failed": 2, "equivalent": 1}
    assert [row.verdict for row in found.regressions(0.03)] == ["lost"]


def test_jobs_join_by_what_they_measure_not_by_how_long(against):
    longer = sweeps.job(fwd_us=100.0, measuring={"budget_s": 5.0, "max_rounds": 100})
    found = against([sweeps.job()], [longer])
    assert {row.verdict for row in found.rows} == {"equivalent"}
    found = against([sweeps.job(options={"block": 64})], [sweeps.job(options={"block": 64}), sweeps.job()])
    assert sorted(row.verdict for row in found.rows) == ["equivalent", "equivalent", "new", "new"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": sweeps.H200 | {"gpu": "NVIDIA H100"}}, "gpu NVIDIA H200 -> NVIDIA H100"),
        ({"measuring": {"timer": "event"}}, "timer device -> event"),
        ({"method_version": "3"}, "method_version 5 -> 3"),
    ],
)
def test_unlike_measurements_are_refused_unless_told_otherwise(against, changes, words):
    with pytest.raises(UserError, match=f"cannot be compared .*{words}.*anyway=true"):
        against([sweeps.job()], [sweeps.job(**changes)])
    found = against([sweeps.job()], [sweeps.job(**changes)], anyway=True)
    assert verdicts(found) == {"equivalent"}
    assert any(note.startswith("compared nevertheless (anyway=true)") for note in found.notes)
    assert any(one.refuses for one in found.differences)


def test_another_processor_is_refused_where_it_is_what_is_measured(against):
    here = {"cpu": "EPYC", "cpu_threads": 2}
    jobs = [
        sweeps.job(device="cpu", environment=environment, measuring={"timer": "cpu"})
        for environment in (here, here | {"cpu": "Xeon"}, here | {"cpu_threads": 8})
    ]
    with pytest.raises(UserError, match="cpu EPYC -> Xeon"):
        against(jobs[:1], jobs[1:2])
    with pytest.raises(UserError, match="cpu_threads 2 -> 8"):
        against(jobs[:1], jobs[2:])
    on_gpu = sweeps.H200 | {"cpu": "EPYC", "cpu_threads": 8}
    assert not any(one.refuses for one in against([sweeps.job()], [sweeps.job(environment=on_gpu)]).differences)


def test_other_differences_are_said_and_counted(against):
    new = sweeps.H200 | {"gpu_uuid": "GPU-2", "driver": "590", "versions": {"torch": "2.12.0"}, "event_floor_us": 2.0}
    found = against([sweeps.job(), sweeps.job("cudnn")], [sweeps.job(environment=new), sweeps.job("cudnn")])
    assert [(str(one), one.cells, one.refuses) for one in found.differences] == [
        ("driver 580.1 -> 590", 2, False),
        ("gpu_uuid GPU-1 -> GPU-2", 2, False),
        ("versions.torch 2.11.0 -> 2.12.0", 2, False),
    ]
    spreads = {row.cell.result.label: row.spread for row in found.rows}
    assert spreads == pytest.approx({"flash": math.hypot(0.022, 0.02), "cudnn": 0.022})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ([sweeps.job("flash")], [sweeps.job("cudnn")], "backend is flash in the old and cudnn in the new"),
        ([sweeps.job(bwd_us=None)], [sweeps.job(device="cpu")], "device is cuda in the old and cpu in the new"),
        (
            [sweeps.job("flash"), sweeps.job("cudnn", of=sweeps.case(batch=1))],
            [sweeps.job("cudnn"), sweeps.job("flash", of=sweeps.case(batch=1))],
            "no backend was measured on a case in both",
        ),
    ],
)
def test_nothing_in_common_says_why(against, old, new, words):
    with pytest.raises(UserError, match=words):
        against(old, new)


def test_names_of_one_kernel_say_what_equal_rows_of_two_sessions_differ_by(against):
    """1.9 % are a difference between two sessions in which one kernel takes the same time, and 2.2 % are the usual."""
    kernel = (Kernel(name="cudnn_flash_fprop_sm90", count=1.0, time_us=50.0),)

    def session(flash_us, cudnn_us):
        named = [sweeps.job(name, cudnn_us, None) for name in ("cudnn", "aten_cudnn")]
        passes = [replace(one.passes["forward"], kernels=kernel) for one in named]
        named = [replace(one, passes={"forward": own}) for one, own in zip(named, passes, strict=True)]
        return [sweeps.job("flash", flash_us, None, half=1e-4), *named]

    def verdict(old, new):
        (row,) = [row for row in against(old, new).rows if row.cell.result.label == "flash"]
        return row.verdict, row.spread

    assert verdict(session(100.0, 50.0), session(101.9, 50.0)) == ("slower", pytest.approx(0.01))
    assert verdict(session(100.0, 50.0), session(101.9, 51.5)) == ("undecided", pytest.approx(0.03))
    assert verdict(session(100.0, 50.0)[:1], session(101.9, 50.0)[:1]) == ("undecided", pytest.approx(0.022))


def test_another_kernel_is_told(against):
    new = sweeps.job()
    passes = {
        name: replace(one, kernels=(replace(one.kernels[0], name="fallback(int)"),)) for name, one in new.passes.items()
    }
    found = against([sweeps.job()], [replace(new, passes=passes)])
    assert "another kernel ran in 1 cells: flash_forward -> fallback" in found.notes
    assert found.rows[0].other_kernel is not None


def noisy(count, sigma, seed, shift=None):
    draw = random.Random(seed)
    return [
        sweeps.job(
            fwd_us=100.0 * math.exp(draw.gauss(0, sigma)) * (1 + (shift or {}).get(index, 0)),
            bwd_us=None,
            of=sweeps.case(batch=index + 1),
        )
        for index in range(count)
    ]


def test_equal_sweeps_are_hardly_ever_called_different(against):
    """Sessions that scatter by as much as two H200 sweeps did: 95 % of rows within 2.2 %."""
    told = 0
    for seed in range(10):
        sigma = 0.022 / 1.96 / 2**0.5
        found = against(noisy(60, sigma, seed), noisy(60, sigma, 1000 + seed))
        told += sum(row.verdict in ("faster", "slower") for row in found.rows)
    assert told <= 6  # 600 cells


def test_a_regression_of_ten_percent_is_found_among_many(against):
    sigma = 0.022 / 1.96 / 2**0.5
    found = against(noisy(200, sigma, 1), noisy(200, sigma, 2, {7: 0.10, 90: 0.12}))
    assert {row.cell.result.case.batch for row in found.regressions(0.03)} == {8, 91}


def on_cpu(count, common, sigma, seed, shift=None, **more):
    """Cells of a CPU on which all share `common`, and each scatters by `sigma` (logarithms)."""
    draw = random.Random(seed)
    return [
        sweeps.job(
            fwd_us=100.0 * math.exp(common + draw.gauss(0, sigma)) * (1 + (shift or {}).get(index, 0)),
            bwd_us=None,
            of=sweeps.case(batch=index + 1),
            device="cpu",
            environment={"cpu": "EPYC"},
            measuring={"timer": "cpu"},
            **more,
        )
        for index in range(count)
    ]


def test_a_busy_cpu_that_slows_all_cells_is_no_verdict_on_them(against):
    """As seen: half of the cells differ by 2 to 5 % from one sweep to the next, partly all together."""
    told = 0
    for seed in range(10):
        found = against(on_cpu(36, 0.0, 0.03, seed), on_cpu(36, -0.05, 0.03, 1000 + seed))
        told += len(found.rows) - sum(row.verdict in ("equivalent", "undecided") for row in found.rows)
    assert told <= 4  # 360 cells
    # All cells three times as slow are no disturbance.
    found = against(on_cpu(36, 0.0, 0.03, 1), on_cpu(36, math.log(3.08), 0.03, 2, flags=("busy_host",)))
    assert {row.verdict for row in found.rows} == {"slower"}
    found = against(on_cpu(36, 0.0, 0.01, 1), on_cpu(36, 0.0, 0.01, 2, {3: 0.3}))
    assert [row.cell.result.case.batch for row in found.rows if row.verdict == "slower"] == [4]


def test_the_difference_between_old_runs_is_the_margin_of_their_cell(tmp_path):
    def day(name, us, minute):
        """A sweep of a backend whose source is another each time, and of one whose is not."""
        own = sweeps.job("mine", us, None, finished_at=sweeps.NOON + minute)
        own = replace(own, request=replace(own.request, source={"sha256": f"{minute:07}"}))
        return sweeps.sweep(tmp_path / name, [own, sweeps.job("cudnn", 100.0, None)])

    first, second = day("first", 100.0, 1), day("second", 111.0, 2)

    def mine(us, old=(first, second), **keys):
        found = compare(day(f"new{us}", us, 100), old, **keys)
        assert len(found.rows) == 2
        said = f"{min(len(old), 10)} old runs of 2 cells: compared with their mean; the margin is at least what they"
        assert any(note.startswith(said) for note in found.notes) == (len(old) > 1)
        return next(row for row in found.rows if row.cell.result.label == "mine")

    assert (mine(104.0).verdict, mine(104.0).old.value) == ("undecided", pytest.approx(math.sqrt(100 * 111)))
    # They differ by 11 %, and so may a new one from the nearest.
    assert [mine(us).verdict for us in (87.0, 91.0, 122.0, 128.0)] == ["faster", "undecided", "undecided", "slower"]
    assert mine(104.0, spread=0.001).verdict == "faster"
    # One run has no margin of its own, and those before the last ten do not count.
    assert mine(104.0, [second]).verdict == "faster"
    assert mine(104.0, [first, *(day(f"later{minute}", 111.0, minute) for minute in range(3, 13))]).verdict == "faster"
