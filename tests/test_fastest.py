"""Who is fastest where: intervals decide, flags inform, and every output gives the same answer."""

import itertools
import json
import re
import shlex
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps

import attn_exp
from attn_exp import compare
from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.duel import rivals_of
from attn_exp.compare.brief import answer_in_brief
from attn_exp.compare.pages import end_page, page
from attn_exp.compare.picks import pick
from attn_exp.compare.render import table, text_of
from attn_exp.compare.standing import standings
from attn_exp.core.dispatch.table import normalised
from attn_exp.core.record.record import Kernel
from attn_exp.results.read import read_folder

ROOT = Path(__file__).resolve().parents[1]
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"
LENGTHS = (512, 1024, 2048)


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))


def forward(backend, us, **more):
    return sweeps.job(backend, us, None, **more)


def grid(us, **more):
    """A job for each backend and length; the backward takes 2.5 times as long as the forward."""
    return [
        sweeps.job(name, time, 2.5 * time, of=sweeps.case(seq_len=length), **more)
        for length in LENGTHS
        for name, time in us(length).items()
    ]


def ran(record, *names, device="cuda"):
    kernels = tuple(Kernel(name=name, count=1.0, time_us=50.0) for name in names)
    own = replace(record.passes["forward"], kernels=kernels)
    return replace(record, request=replace(record.request, device=device), passes={"forward": own})


def found_in(tmp_path, records, **keys):
    return compare(sweeps.sweep(tmp_path / "s", records), **keys)


def best(found):
    return sorted(row.label for row in found.rows if row.best)


def test_one_winner_everywhere_is_one_line(tmp_path):
    found = found_in(tmp_path, grid(lambda length: {"flash": 1.59 * length, "cudnn": length, "math": 9.0 * length}))
    assert found.answer.lines() == [
        "cudnn is fastest in all 3 shapes, forward and backward: 1.59x flash [1.57, 1.61] "
        "(forward 1.59x, backward 1.59x)"
    ]


def test_one_case_needs_no_count(tmp_path):
    (line,) = found_in(tmp_path, [forward("flash", 200.0), forward("cudnn", 100.0)]).answer.lines()
    assert line == "cudnn is fastest: 2.00x flash [1.98, 2.02]"


def test_winners_that_differ_are_counted(tmp_path):
    def us(length):
        return {"flash": 80.0 if length == 512 else 100.0, "cudnn": 100.0 if length == 512 else 50.0, "math": 900.0}

    (line,) = found_in(tmp_path, grid(us)).answer.lines()
    assert line.startswith("cudnn is fastest in 4 of 6 (3 shapes, forward and backward): 1.47x flash [")
    assert line.endswith("; flash in 2")


def test_rows_too_close_share_the_win_and_a_duel_is_named(tmp_path):
    found = found_in(tmp_path, [forward("flash", 100.3), forward("cudnn", 100.0), forward("math", 300.0)])
    assert best(found) == ["cudnn", "flash"]
    headline, said, command = found.answer.lines()
    assert headline.startswith("cudnn and flash are too close to call: cudnn is 3.00x math [")
    assert said == "cudnn and flash are too close to call; to decide:"
    assert rivals_of(shlex.split(command)[2:])


def test_several_ties_name_the_command_that_decides_all(tmp_path):
    records = [
        forward(name, us, of=sweeps.case(seq_len=length))
        for length in LENGTHS
        for name, us in (("flash", 100.3), ("cudnn", 100.0))
    ]
    _, said, command = found_in(tmp_path, records).answer.lines()
    assert said == "too close to call in 3 of 3; to decide all:"
    assert re.fullmatch(r"attn-exp compare \S+ folder=\S+ settle=true", command)


@pytest.mark.parametrize("flag", ["busy_host", "shared_gpu", "unstable", "drift", "timers_disagree"])
def test_a_flag_changes_neither_winner_nor_mean(tmp_path, flag):
    found = found_in(tmp_path, [forward("flash", 100.0), forward("cudnn", 50.0, flags=(flag,))])
    assert best(found) == ["cudnn"]
    (mean,) = [one for one in found.means if one.label == "flash"]
    assert mean.value == pytest.approx(0.5)


def test_a_wide_interval_ties_with_what_it_may_be(tmp_path):
    near = found_in(tmp_path / "a", [forward("flash", 100.0), forward("cudnn", 90.0, half=0.2)])
    assert best(near) == ["cudnn", "flash"]
    far = found_in(tmp_path / "b", [forward("flash", 400.0), forward("cudnn", 90.0, half=0.2)])
    assert best(far) == ["cudnn"]


def test_a_busy_host_widens_intervals_on_a_cpu_only(tmp_path):
    def winners(folder, device, flags):
        records = [forward("flash", 108.0, device=device, flags=flags), forward("math", 100.0, device=device)]
        return best(found_in(tmp_path / folder, records))

    assert winners("a", "cpu", ()) == ["math"] and winners("b", "cpu", ("busy_host",)) == ["flash", "math"]
    assert winners("c", "cuda", ("busy_host",)) == ["math"]


def test_a_row_without_a_value_is_left_out(tmp_path):
    found = found_in(tmp_path, [forward("flash", 100.0), forward("cudnn", 200.0), sweeps.failed(backend="math")])
    assert found.answer.headline() == ["flash is fastest: 2.00x cudnn [1.98, 2.02]"]
    assert columns(found) == ["flash", "cudnn"]
    for form in ("table", "markdown", "html"):
        assert "no number: math (unsupported)" in text_of(page(found), form)
    assert "no number: math (unsupported)" in answer_in_brief(found)
    of = sweeps.case(seq_len=512)
    some = [sweeps.job("flash", of=of), sweeps.failed(of=of, backend="math"), sweeps.job("math")]
    found = found_in(tmp_path / "some", some)
    assert found.table.note == "" and "unsup." in text_of(page(found))


def columns(found):
    return [column.head for column in found.table.columns if column.form == "right"]


def test_names_of_one_kernel_are_one_column_with_their_mean(tmp_path):
    records = [ran(forward("cudnn", 90.0), CUDNN), ran(forward("auto", 90.8), CUDNN), forward("flash", 200.0)]
    found = found_in(tmp_path, [*records, forward("auto", 50.0, of=sweeps.case(seq_len=512))], show="us")
    assert columns(found) == ["cudnn, auto", "flash"]
    assert [row["cudnn, auto"] for row in found.table.texts()] == ["50.0", "*90.4"]


@pytest.mark.parametrize("why", ["another kernel", "another time", "another kernel in one case"])
def test_names_that_differ_anywhere_keep_their_columns(tmp_path, why):
    records = [ran(forward("cudnn", 100.0), CUDNN), ran(forward("auto", 100.1), CUDNN)]
    if why == "another kernel":
        records[1] = forward("auto", 100.1)
    elif why == "another time":
        records[1] = ran(forward("auto", 104.0), CUDNN)
    else:
        records += [forward(name, 100.0, of=sweeps.case(seq_len=512)) for name in ("cudnn", "auto")]
    assert sorted(columns(found_in(tmp_path, records))) == ["auto", "cudnn"]


def test_one_backend_gives_its_numbers(tmp_path):
    found = found_in(tmp_path, [forward("flash", 100.0, of=sweeps.case(seq_len=length)) for length in LENGTHS])
    assert found.answer.lines() == [] and "nothing to compare" in str(found.answer)
    assert "100.0" in text_of(page(found))


def test_the_order_in_eager_pytorch_is_said_where_it_differs(tmp_path):
    def job(name, us, event_us, length):
        record = forward(name, us, of=sweeps.case(seq_len=length))
        return replace(record, metrics=record.metrics | {"forward/event_time_us": event_us})

    def line(folder, flash_events):
        records = [
            one
            for length, event_us in zip(LENGTHS, flash_events, strict=True)
            for one in (job("cudnn", 10.0, 60.0, length), job("flash", 20.0, event_us, length))
        ]
        return found_in(tmp_path / folder, records).answer.headline()[1:]

    said = "In eager PyTorch, where Python launches each call, flash is faster in 2 of 3."
    assert line("a", (40.0, 40.0, 60.0)) == [said]
    # A difference below what the timer can tell says nothing.
    assert line("b", (59.0, 60.0, 70.0)) == []


def test_two_backends_that_ran_one_kernel_are_one_rival(tmp_path):
    """Told apart by 3 %, which is noise then; and two names are not two chances to be the best."""
    records = [ran(forward("cudnn", 100.0), CUDNN), ran(forward("auto", 103.0), CUDNN), forward("flash", 130.0)]
    found = found_in(tmp_path, records)
    assert best(found) == ["auto", "cudnn"] and found.ties == ()
    assert found.answer.lines() == ["cudnn (same kernel: auto) is fastest: 1.30x flash [1.29, 1.31]"]


@pytest.mark.parametrize("memory", ["Memset (Device)", "Memset", "Memcpy DtoD"])
def test_filling_memory_before_a_kernel_leaves_it_the_same(tmp_path, memory):
    """A kept table has names without what stands in brackets."""
    records = [ran(forward(name, us), CUDNN, memory) for name, us in (("cudnn", 100.0), ("auto", 103.0))]
    assert best(found_in(tmp_path, records)) == ["auto", "cudnn"]


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
    assert best(found_in(tmp_path, records)) == ["cudnn"]


def test_of_another_metric_it_says_by_which(tmp_path):
    records = [
        replace(one, metrics=one.metrics | {"forward/joules_per_call": joules, "forward/power_error": 0.01})
        for one, joules in ((forward("flash", 100.0), 0.1), (forward("cudnn", 50.0), 0.2))
    ]
    (line,) = found_in(tmp_path, records, metric="joules_per_call").answer.lines()
    assert line.startswith("flash is best by joules_per_call: 2.00x cudnn [")


def test_ranks_follow_the_winners(tmp_path):
    found = found_in(tmp_path, [forward("flash", 100.3), forward("cudnn", 100.0), forward("math", 300.0)])
    ranks = {job.partition("-")[0]: own["forward/rank"] for job, own in standings(found).of_jobs.items()}
    assert ranks == {"flash": 1.0, "cudnn": 1.0, "math": 3.0}


@pytest.mark.parametrize(("show", "text"), [("us", "100"), ("tflops", "172"), ("gb/s", "")])
def test_the_table_shows_the_unit_that_was_chosen(tmp_path, show, text):
    found = found_in(tmp_path, [forward("flash", 100.0), forward("math", 300.0)], show=show)
    (row,) = found.table.texts()
    assert row["flash"] == f"*{text}"


def test_a_narrow_table_omits_the_slowest_and_says_so(tmp_path):
    names = [f"backend{letter}" for letter in "abcdefgh"]
    found = found_in(tmp_path, [forward(name, 100.0 + 50 * at) for at, name in enumerate(names)])
    text = table(end_page(found), width=80)
    assert "omitted to fit the width: backendh, backendg" in text and "backenda" in text.split("omitted")[0]
    assert max(map(len, text.splitlines())) <= 80


def test_a_narrow_table_says_once_what_all_cases_have(tmp_path):
    unlike = replace(sweeps.CASE, batch=64, q_heads=8, kv_heads=2, q_len=1, head_dim=64, value_dim=64, page_size=16)
    records = [forward(f"backend{letter}", 100.0, of=of) for letter in "abcd" for of in (sweeps.CASE, unlike)]
    wide, narrow = (table(end_page(found_in(tmp_path, records)), width=width) for width in (150, 105))
    assert "every case" not in wide and "omitted" not in narrow, narrow
    assert "every case: bf16 causal" in narrow and "\nb64 h8/2 q1" in narrow, narrow


def test_every_output_of_a_kept_sweep_names_the_same_winners(tmp_path, capsys):
    with tarfile.open(ROOT / "results" / "h200" / "backends" / "table.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "table"
    found = compare(folder)
    headline, *_ = found.answer.headline()
    assert headline.startswith("fa3 is fastest in all 6 shapes, forward and backward: 1.13x")
    won = {(one.group[0].cell.result.case.label(), one.direction): set(one.labels) for one in found.answer.won}

    def joined(text):
        return " ".join(text.split())

    # README, a sweep's end, the terminal, Markdown, HTML, MLflow's page and a notebook begin with the headline.
    readme = joined((ROOT / "README.md").read_text())
    outputs = [readme, *(joined(text_of(page(found), form)) for form in ("table", "markdown", "html"))]
    outputs += [joined(table(end_page(found))), answer_in_brief(found).replace("\\", "")]
    outputs.append(joined(attn_exp.load(str(folder))._repr_html_()))
    assert [headline in text for text in outputs] == [True] * len(outputs)
    # JSON and the rows of CSV mark the same rows.
    assert compare_main([str(folder), "format=json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert {(one["case"], one["pass"]): set(one["fastest"]) for one in whole["answer"]} == won
    marked = {(one.cell.result.case.label(), one.cell.direction, one.label) for one in found.rows if one.best}
    assert marked == {(*place, label) for place, labels in won.items() for label in labels}
    # The dispatch table picks a winner of the forward, among backends that a model can call.
    table_ = pick([read_folder(folder)], backends=("flash", "cudnn", "efficient")).table
    own = compare(folder, where="backend in (flash, cudnn, efficient)")
    forward_won = {
        normalised(one.group[0].cell.result.case): one.labels for one in own.answer.won if one.direction == "forward"
    }
    picked = {bucket.case: bucket.pick for bucket in table_.buckets if bucket.mode == "inference"}
    assert picked and all(picked[case] in labels for case, labels in forward_won.items())
    assert all(bucket.margin is None or bucket.margin.times > 1 for bucket in table_.buckets)


def test_cases_of_several_kinds_are_counted_once(tmp_path):
    cases = itertools.product((512, 1024), (True, False))
    records = [
        forward(name, us, of=sweeps.case(seq_len=length, causal=causal))
        for length, causal in cases
        for name, us in (("flash", 100.0), ("math", 300.0))
    ]
    (line,) = found_in(tmp_path, records).answer.lines()
    assert line.startswith("flash is fastest in all 4 shapes: 3.00x math [")
