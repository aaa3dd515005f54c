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
from attn_exp.comparison.answer import spreads_for
from attn_exp.comparison.pages import answer_in_brief, end_page, page
from attn_exp.comparison.picks import pick
from attn_exp.comparison.ranking import by_group
from attn_exp.comparison.ratio import ratio
from attn_exp.comparison.standing import standings
from attn_exp.core.errors import UserError
from attn_exp.core.record.record import METHOD_VERSION, Kernel
from attn_exp.core.sheet.render import text_of
from attn_exp.results.read import read_folder

ROOT = Path(__file__).resolve().parents[1]
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"
LENGTHS = (512, 1024, 2048)
OF_LENGTHS = [sweeps.case(seq_len=length) for length in LENGTHS]


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


def noisy(name, us, half):
    """A job beside which other programs used 1.6 of 2 processors."""
    record = forward(name, us, half=half, flags=("unstable",) * (half > 0.02))
    busy = {"at": 0.0, "busy_s": 0.0, "own_s": 0.0}, {"at": 10.0, "busy_s": 26.03, "own_s": 10.0}
    return replace(record, telemetry=busy, environment=record.environment | {"cpu_affinity": "0-1"})


def lead(found):
    """The other backend that the winner leads, and the lead with its interval."""
    own = found.answer.lead
    return own.over, *(round(value, 2) for value in (own.value, own.low, own.high))


def of_lengths(*times):
    """A forward of flash and cudnn at each length: the times of both in microseconds."""
    return [
        forward(name, us, of=of)
        for of, pair in zip(OF_LENGTHS, times, strict=False)
        for name, us in zip(("flash", "cudnn"), pair, strict=True)
    ]


def test_the_headline_in_words(tmp_path):
    """The only test of the exact words; the others ask who won."""
    powered = [
        replace(record, metrics=record.metrics | {"forward/joules_per_call": joules, "forward/power_error": 0.01})
        for record, joules in zip(of_lengths((100.0, 50.0)), (0.1, 0.2), strict=True)
    ]
    records = {
        "one": of_lengths((200, 100)),
        "all": of_lengths((159, 100), (318, 200)),
        "some": of_lengths((80, 100), (100, 50), (100, 50)),
        "tie": of_lengths((100.3, 100)),
        "ties": [*of_lengths((100.3, 100), (100.3, 100)), *(forward("math", 900, of=one) for one in OF_LENGTHS[:2])],
        "metric": powered,
        "doubt": [ran(forward(name, us), CUDNN) for name, us in (("cudnn", 100.0), ("cudnn_graph", 109.0))],
        "noise": [noisy("flash", 90.0, 0.4), noisy("cudnn", 100.0, 0.01)],
        "nothing": [forward("flash", 100.0)],
    }
    found = {
        name: compare(sweeps.sweep(tmp_path / name, every), metric="joules" if name == "metric" else "time_us").answer
        for name, every in records.items()
    }
    assert {name: [*answer.headline(), answer.next_step()[0]] for name, answer in found.items()} == {
        "one": ["cudnn is fastest, 2.00 times as fast as flash [1.98, 2.02]", ""],
        "all": ["cudnn is fastest in both rows, 1.59 times as fast as flash [1.57, 1.61]", ""],
        "some": ["cudnn is fastest in 2 of 3 rows, 1.47 times as fast as flash [1.46, 1.49]; flash in 1", ""],
        "tie": ["cudnn and flash are too close to call", "cudnn and flash are too close to call; to decide:"],
        "ties": [
            "cudnn and flash are too close to call in both rows; cudnn is 9.00 times as fast as math [8.91, 9.09]",
            "too close to call in 2 of 2; to decide all:",
        ],
        "metric": ["flash is best by joules_per_call, 2.00 times as good as cudnn [1.96, 2.04]", ""],
        "doubt": [
            "cudnn is fastest, 1.09 times as fast as cudnn_graph [1.08, 1.10]",
            "cudnn and cudnn_graph ran one kernel and differ by 9 %: this sweep is not to be trusted below that",
            "",
        ],
        "noise": ["not measured well enough in 1 of 1 rows: other programs used 1.6 of 2 processors", ""],
        "nothing": [""],
    }
    assert "nothing to compare" in str(found["nothing"])


def test_rows_too_close_share_the_win_and_a_duel_is_named(tmp_path):
    found = found_in(tmp_path, [forward("flash", 100.3), forward("cudnn", 100.0), forward("math", 300.0)])
    assert best(found) == ["cudnn", "flash"]
    assert found.answer.ties == 1 and lead(found) == ("math", 3.0, 2.97, 3.03)
    assert rivals_of(shlex.split(found.answer.next_step()[1])[2:])
    ranks = {job.partition("-")[0]: own["forward/rank"] for job, own in standings(found).of_jobs.items()}
    assert ranks == {"flash": 1.0, "cudnn": 1.0, "math": 3.0}


def test_several_ties_name_the_command_that_decides_all(tmp_path):
    answer = found_in(tmp_path, of_lengths(*[(100.3, 100.0)] * 3)).answer
    assert answer.ties == 3 and re.fullmatch(r"attn-exp compare \S+ folder=\S+ settle=true", answer.next_step()[1])


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
    assert lead(found) == ("cudnn", 2.0, 1.98, 2.02) and columns(found) == ["flash", "cudnn"]
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
    assert columns(found) == ["auto, cudnn", "flash"]
    assert [row["auto, cudnn"] for row in found.table.texts()] == ["50.0", "*90.4"]


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
    assert "100.0" in text_of(page(found_in(tmp_path, [forward("flash", 100.0, of=of) for of in OF_LENGTHS])))


def test_the_order_in_eager_pytorch_is_said_where_it_differs(tmp_path):
    def job(name, us, event_us, length):
        record = forward(name, us, of=sweeps.case(seq_len=length))
        return replace(record, metrics=record.metrics | {"forward/event_time_us": event_us})

    def found(folder, flash_events):
        records = [
            one
            for length, event_us in zip(LENGTHS, flash_events, strict=True)
            for one in (job("cudnn", 10.0, 60.0, length), job("flash", 20.0, event_us, length))
        ]
        return found_in(tmp_path / folder, records).answer

    answer = found("a", (40.0, 40.0, 60.0))
    assert (answer.eager, answer.eager_rows) == ({"flash": 2}, 3) and "eager PyTorch" in answer.headline()[1]
    # A difference below what the timer can tell says nothing.
    assert not found("b", (59.0, 60.0, 70.0)).eager


def test_names_of_one_kernel_that_agree_are_one_rival_which_ranks_by_its_mean(tmp_path):
    """The fastest single row is that of cudnn, and the mean of both is no faster than flash."""
    records = [ran(forward("cudnn", 100.0), CUDNN), ran(forward("auto", 100.8), CUDNN), forward("flash", 130.0)]
    found = found_in(tmp_path, records)
    assert best(found) == ["auto", "cudnn"] and found.ties == ()
    assert found.answer.ties == 0 and lead(found) == ("flash", 1.29, 1.28, 1.31)
    ahead = ran(forward("flash", 100.3, half=1e-6), "flash_fwd_sm90")
    (won,) = found_in(tmp_path / "mean", [*records[:2], ahead]).answer.won
    assert won.tied and won.rows[0].label == "flash"


def test_the_interval_alone_decides_between_names_of_one_kernel(tmp_path):
    """A backend that waits 3 ms before it runs flash is no tie with flash."""
    records = [ran(forward(name, us), CUDNN) for name, us in (("cudnn", 100.0), ("slow", 3100.0))]
    found = found_in(tmp_path, records)
    assert best(found) == ["cudnn"] and found.answer.ties == 0
    assert [len(row.kernel) for row in found.rows] == [1, 1]
    assert standings(found).of_jobs[records[1].request.job]["forward/rank"] == 2.0


def test_a_kernel_that_is_launched_twice_is_another_one(tmp_path):
    records = [ran(forward(name, 100.0), CUDNN) for name in ("cudnn", "twice")]
    twice = replace(records[1].passes["forward"], kernels=(Kernel(name=CUDNN, count=2.0, time_us=50.0),))
    found = found_in(tmp_path, [records[0], replace(records[1], passes={"forward": twice})])
    assert [row.kernel for row in found.rows] == [(), ()] and found.answer.ties == 1


def test_a_row_that_was_not_measured_well_enough_is_no_contender(tmp_path):
    records = [noisy("flash", 900.0, 0.4), noisy("cudnn", 100.0, 0.01), noisy("math", 300.0, 0.01)]
    found = found_in(tmp_path, records)
    assert best(found) == ["cudnn"] and lead(found)[:2] == ("math", 3.0)
    assert "? not measured well enough" in text_of(page(found))
    assert standings(found).of_jobs[records[0].request.job].get("forward/rank") is None


def test_a_cell_such_a_row_may_win_has_no_winner_and_no_pick(tmp_path):
    records = [noisy("flash", 90.0, 0.4), noisy("cudnn", 100.0, 0.01), noisy("math", 300.0, 0.01)]
    found = found_in(tmp_path / "one", records)
    assert found.answer.won == () and found.answer.unmeasured == 1
    assert found.answer.noise in text_of(end_page(found), "markdown")
    more = [forward(name, us, of=sweeps.case(seq_len=512)) for name, us in (("cudnn", 50.0), ("math", 80.0))]
    found = found_in(tmp_path / "more", [*records, *more])
    assert [won.labels for won in found.answer.won] == [("cudnn",)] and found.answer.unmeasured == 1
    assert lead(found) == ("math", 1.6, 1.58, 1.62)
    picked = pick([read_folder(tmp_path / "more" / "s")], every=True)
    assert len(picked.table.buckets) == 1
    assert "1 of 2 cases were not measured well enough for inference" in picked.notes
    with pytest.raises(UserError, match="nothing to pick from: 1 of 1 cases were not measured well enough"):
        pick([read_folder(tmp_path / "one" / "s")], every=True)


@pytest.mark.parametrize("memory", ["Memset (Device)", "Memset", "Memcpy DtoD"])
def test_filling_memory_before_a_kernel_leaves_it_the_same(tmp_path, memory):
    """A kept table has names without what stands in brackets."""
    records = [ran(forward(name, us), CUDNN, memory) for name, us in (("cudnn", 100.0), ("auto", 100.9))]
    assert [row.same for row in found_in(tmp_path, records).rows] == [("cudnn",), ("auto",)]


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
    assert not any(row.kernel for row in found_in(tmp_path, records).rows)


@pytest.mark.parametrize(("show", "text"), [("us", "100"), ("tflops", "172"), ("gb/s", "")])
def test_the_table_shows_the_unit_that_was_chosen(tmp_path, show, text):
    found = found_in(tmp_path, [forward("flash", 100.0), forward("math", 300.0)], show=show)
    (row,) = found.table.texts()
    assert row["flash"] == f"*{text}"


def test_a_narrow_table_omits_the_slowest_and_says_so(tmp_path):
    names = [f"backend{letter}" for letter in "abcdefgh"]
    found = found_in(tmp_path, [forward(name, 100.0 + 50 * at) for at, name in enumerate(names)])
    text = text_of(end_page(found), width=80)
    assert "omitted to fit the width: backendh, backendg" in text and "backenda" in text.split("omitted")[0]
    assert max(map(len, text.splitlines())) <= 80


def test_a_winner_that_is_far_behind_elsewhere_is_shown_and_the_headline_says_so(tmp_path):
    names = [f"backend{letter}" for letter in "abcdefgh"]
    times = {name: [100.0 + at] * 3 for at, name in enumerate(names)} | {"backendh": [90.0, 90.0, 400.0]}
    found = found_in(
        tmp_path,
        [
            forward(name, us, of=sweeps.case(seq_len=length))
            for name, own in times.items()
            for length, us in zip((1024, 2048, 4096), own, strict=True)
        ],
    )
    assert found.answer.headline()[0].startswith("backendh is fastest in 2 of 3 rows, over all rows only 0.6")
    shown = text_of(end_page(found), width=80).split("omitted")[0].splitlines()
    assert any("backenda" in line and "backendh" in line for line in shown)


def test_a_narrow_table_says_once_what_all_cases_have(tmp_path):
    unlike = replace(sweeps.CASE, batch=64, q_heads=8, kv_heads=2, q_len=1, head_dim=64, value_dim=64, page_size=16)
    records = [forward(f"backend{letter}", 100.0, of=of) for letter in "abcd" for of in (sweeps.CASE, unlike)]
    wide, narrow = (text_of(end_page(found_in(tmp_path, records)), width=width) for width in (150, 105))
    assert "every case" not in wide and "omitted" not in narrow, narrow
    assert "every case: bf16 causal" in narrow and "\nb64 h8/2 q1" in narrow, narrow


@pytest.mark.parametrize(
    ("kept", "winner", "wins", "ties"),
    [("h200/backends/table", "fa3", 12, 0), ("h100/backends/flux_blocks", "cudnn+default", 3, 3)],
    ids=["decided", "ties"],
)
def test_every_output_of_a_kept_sweep_names_the_same_winners(tmp_path, capsys, kept, winner, wins, ties):
    with tarfile.open(ROOT / "results" / f"{kept}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / kept.rpartition("/")[2]
    found = compare(folder)
    headline = found.answer.headline()[0]
    assert headline.startswith(winner) and len(headline) <= 120
    assert sum(not one.tied and winner in one.labels for one in found.answer.won) == wins and found.answer.ties == ties
    won = {(one.group[0].cell.result.case.label(), one.direction): set(one.labels) for one in found.answer.won}

    def joined(text):
        return " ".join(text.split())

    # A sweep's end, the terminal, Markdown, HTML, MLflow's page and a notebook begin with the headline.
    outputs = [joined(text_of(page(found), form)) for form in ("table", "markdown", "html")]
    outputs += [joined(text_of(end_page(found))), answer_in_brief(found).replace("\\", "")]
    outputs.append(joined(attn_exp.load(str(folder))._repr_html_()))
    assert [headline in text for text in outputs] == [True] * len(outputs)
    # JSON, the rows of CSV and the ranks in MLflow mark the same rows.
    assert compare_main([str(folder), "format=json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert {(one["case"], one["pass"]): set(one["fastest"]) for one in whole["answer"]} == won
    best_rows = [row for one in found.answer.won for row in one.rows]
    marked = {(one.cell.result.case.label(), one.cell.direction, one.label) for one in best_rows}
    assert marked == {(*place, label) for place, labels in won.items() for label in labels}
    ranks = standings(found).of_jobs
    assert all(ranks[one.cell.result.job][f"{one.cell.direction}/rank"] == 1.0 for one in best_rows)
    # The dispatch table picks a winner of the forward, of two names of one kernel not the second one with a margin.
    buckets = pick([read_folder(folder)], every=True).table.buckets
    picked = {bucket.case: bucket for bucket in buckets if bucket.mode == "inference"}
    for one in found.answer.won:
        if one.direction == "forward":
            bucket = picked[one.group[0].cell.result.case]
            assert bucket.pick in one.labels and bool(bucket.undecided) == one.tied
            assert bucket.margin is None or bucket.margin.over not in one.labels


def test_pairs_of_one_kernel_are_equal_by_their_intervals_in_all_kept_sweeps_of_this_method(tmp_path):
    inside, pairs = 0, 0
    for path in sorted((ROOT / "results").glob("*/*/*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
        found = compare(tmp_path / path.name.removesuffix(".tar.xz"))
        spreads = spreads_for([row.cell.result for row in found.rows], None)
        for group in by_group(found.rows):
            for one, other in itertools.combinations(group, 2):
                if one.cell.result.method_version == METHOD_VERSION and other.label in one.kernel:
                    over = ratio([one.cell], [other.cell], found.metric, spreads)
                    pairs, inside = pairs + 1, inside + (over.low <= 1 <= over.high)
    assert pairs >= 300 and inside >= 0.93 * pairs
