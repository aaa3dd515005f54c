"""Rows that decide nothing, and backends that are one: a busy machine picks no winner, nor do two names of a kernel."""

from dataclasses import replace

import pytest
import sweeps

from attn_exp import compare
from attn_exp.commands.compare import main as compare_main
from attn_exp.compare.pages import page
from attn_exp.compare.render import text_of
from attn_exp.core.record import Kernel, PassRecord

CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))


def forward(backend, us, **more):
    return sweeps.job(backend, us, None, **more)


def ran(record, *names, device="cuda"):
    kernels = tuple(Kernel(name=name, count=1.0, time_us=50.0) for name in names)
    own = replace(record.passes["forward"], kernels=kernels)
    return replace(record, request=replace(record.request, device=device), passes={"forward": own})


def rows(found):
    return {row.cell.result.label: row for row in found.rows}


@pytest.mark.parametrize("doubt", ["busy_host", "shared_gpu", "unstable"])
def test_a_row_in_doubt_is_neither_best_nor_worse_nor_in_a_mean_and_it_is_said(tmp_path, doubt):
    records = [forward("flash", 100.0), forward("cudnn", 50.0, flags=(doubt,)), forward("math", 300.0)]
    found = compare(sweeps.sweep(tmp_path / "s", records))
    assert {label: (row.best, row.doubt) for label, row in rows(found).items()} == {
        "flash": (False, ""), "cudnn": (False, doubt), "math": (False, "")
    }  # fmt: skip
    # The others are compared with the best of those that count.
    assert rows(found)["math"].gain.value == pytest.approx(1 / 3)
    (mean,) = [one for one in found.means if one.label == "cudnn"]
    assert (mean.value, mean.n, mean.left_out) == (None, 0, ((doubt, 1),))
    # It is surely faster than the best of them: nothing is picked.
    assert [(rule.label, rule.open) for rule in found.answer.rules] == [("", 1)]
    assert [(tally.picks, tally.open) for tally in found.answer.tallies] == [({}, 1)]
    # It may be better: a duel would tell.
    assert [(duel.a.result.label, duel.b.result.label) for duel in found.ties] == [("cudnn", "flash")]
    text = text_of(page(found))
    assert f"1 of 3 rows decide nothing (1 {doubt})" in " ".join(text.split())
    assert "no row of a case and pass is best where one in doubt (?) may be: a duel decides" in found.notes


def test_a_wide_interval_decides_nothing_even_without_a_mark(tmp_path):
    found = compare(sweeps.sweep(tmp_path / "s", [forward("flash", 100.0), forward("cudnn", 50.0, half=0.06)]))
    assert rows(found)["cudnn"].doubt == "a wide interval" and rows(found)["cudnn"].challenge.low > 1
    assert not rows(found)["cudnn"].best and not rows(found)["flash"].best


def test_in_a_sweep_of_doubt_alone_nothing_is_picked(tmp_path):
    records = [forward(name, us, flags=("busy_host",)) for name, us in (("flash", 100.0), ("cudnn", 50.0))]
    found = compare(sweeps.sweep(tmp_path / "s", records), baseline="flash")
    assert not any(row.best for row in found.rows)
    assert found.answer.rules == () and all(mean.value is None for mean in found.means)


def test_a_baseline_in_doubt_gives_no_mean(tmp_path):
    records = [forward("flash", 100.0, flags=("unstable",)), forward("cudnn", 50.0)]
    found = compare(sweeps.sweep(tmp_path / "s", records), baseline="flash")
    (mean,) = [one for one in found.means if one.label == "cudnn"]
    assert mean.left_out == (("flash unstable", 1),)


def test_memory_and_errors_are_not_in_doubt(tmp_path):
    records = [forward("flash", 100.0, flags=("busy_host",)), forward("cudnn", 50.0, flags=("busy_host",))]
    found = compare(sweeps.sweep(tmp_path / "s", records), metric="peak_memory_bytes")
    assert all(row.doubt == "" for row in found.rows)


def test_a_flag_of_one_pass_leaves_the_other_in_peace(tmp_path):
    record = sweeps.job("flash", 100.0, 250.0, flags=("unstable", "power_capped"))
    passes = {name: replace(one, flags=("unstable",) * (name == "backward")) for name, one in record.passes.items()}
    found = compare(sweeps.sweep(tmp_path / "s", [replace(record, passes=passes), sweeps.job("cudnn", 200.0)]))
    own = {row.cell.direction: row for row in found.rows if row.cell.result.label == "flash"}
    assert (own["forward"].doubt, own["backward"].doubt) == ("", "unstable")
    assert own["forward"].best and own["forward"].cell.flags == ("power_capped",)


def test_a_busy_machine_finds_no_regression_and_says_so(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    sweeps.write(old, [forward("flash", 100.0), forward("math", 100.0)])
    sweeps.write(new, [forward("flash", 200.0, flags=("busy_host",)), forward("math", 200.0)])
    assert compare_main([str(new), f"against={old}", "fail_if_slower=3%", "format=json"]) == 1
    text = capsys.readouterr().out
    assert '"undecided": 1' in text and '"slower": 1' in text
    assert "1 of 2 rows decide nothing (1 busy_host)" in text


def test_two_backends_that_ran_one_kernel_are_one_rival(tmp_path):
    """Told apart by 3 %, which is noise then; and two names are not two chances to be the best."""
    records = [ran(forward("cudnn", 100.0), CUDNN), ran(forward("auto", 103.0), CUDNN), forward("flash", 130.0)]
    found = compare(sweeps.sweep(tmp_path / "s", records))
    assert rows(found)["cudnn"].best and rows(found)["auto"].best and not rows(found)["flash"].best
    assert rows(found)["cudnn"].same == ("auto",) and rows(found)["flash"].same == ()
    assert found.ties == ()
    text = " ".join(text_of(page(found)).split())
    assert "same kernel: these backends ran one and the same kernel" in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("_fwd_kernel",), ("_fwd_kernel",)),  # a plain name says nothing of its tiles
        ((CUDNN,), (CUDNN, "void at::native::fill<float>")),  # one of them does more
        ((CUDNN, "triton_poi_fused_0"), (CUDNN, "triton_poi_fused_0")),
    ],
)
def test_kernels_that_may_differ_are_not_the_same(tmp_path, one, other):
    records = [ran(forward("cudnn", 100.0), *one), ran(forward("auto", 103.0), *other)]
    found = compare(sweeps.sweep(tmp_path / "s", records))
    assert all(row.same == () for row in found.rows) and not rows(found)["auto"].best


def test_records_without_flags_of_passes_keep_all_flags():
    assert PassRecord().flags == ()
