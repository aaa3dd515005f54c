"""A sweep beside published figures: who meets whom, counted in one way, and what a file may lack."""

import pytest
import sweeps

from attn_exp import compare
from attn_exp.core.errors import UserError
from attn_exp.core.flops import flops_common_convention

HEAD = (
    "source,gpu,library,version,dtype,batch,q_heads,kv_heads,head_dim,value_dim,q_len,kv_len,causal,window,pass,"
    "deterministic,tflops"
)
ROW = "a paper,{gpu},{library},9.19,{dtype},4,16,16,128,128,1024,1024,{causal},{window},{side},{fixed},{tflops}"


def line(**changes):
    given = {"gpu": "H200 SXM", "library": "FA2", "dtype": "bfloat16", "causal": "true", "window": "",
             "side": "forward", "fixed": "false", "tflops": "300"}  # fmt: skip
    return ROW.format(**given | changes)


@pytest.fixture
def beside(tmp_path):
    count = iter(range(100))

    def run(records, *lines, head=HEAD):
        file = tmp_path / "figures.csv"
        file.write_text("\n".join([head, *lines]) + "\n")
        return compare(sweeps.sweep(tmp_path / f"s{next(count)}", records), published=file)

    return run


def test_the_common_convention_worked_out_by_hand():
    of = sweeps.case(batch=2, q_heads=8, kv_heads=2, seq_len=512, head_dim=192, value_dim=128, causal=False)
    forward = 2 * 8 * 512 * 512 * 2 * (192 + 128)
    assert flops_common_convention(of, "forward") == forward
    assert flops_common_convention(of, "backward") == 2.5 * forward
    assert flops_common_convention(sweeps.case(causal=True), "forward") == 4 * 16 * 1024 * 1024 * 4 * 128 / 2


def test_ours_is_counted_as_theirs_and_meets_its_own_library(beside):
    records = [sweeps.job("flash", 100.0, 300.0), sweeps.job("cudnn", 60.0, 200.0)]
    found = beside(records, line(), line(side="backward", tflops="250"), line(library="cuDNN graph", tflops="500"))
    rows = {(row.figure.library, row.figure.direction): row for row in found.rows}
    work = 4 * 16 * 1024 * 1024 * 4 * 128 / 2
    assert rows["FA2", "forward"].cell.result.label == "flash"
    assert rows["FA2", "forward"].tflops == pytest.approx(work / 100e-6 / 1e12)
    assert rows["FA2", "forward"].ratio == pytest.approx(work / 100e-6 / 1e12 / 300)
    assert rows["FA2", "backward"].tflops == pytest.approx(2.5 * work / 300e-6 / 1e12)
    assert rows["cuDNN graph", "forward"].cell.result.label == "cudnn"
    assert all(row.same_library and row.same_gpu for row in found.rows)


def test_a_block_is_not_the_attention_that_was_published(beside):
    block = sweeps.case(workload="decoder_layer", mlp_dim=512)
    assert beside([sweeps.job("flash", 100.0), sweeps.job("cudnn", 60.0, of=block)], line()).rows[0].tflops > 0
    found = beside([sweeps.job("flash", 100.0), sweeps.job("flash", 9.0, of=block)], line())
    assert [row.cell.result.case.workload for row in found.rows] == [None]


def test_a_library_that_was_not_measured_stands_beside_the_fastest(beside):
    found = beside([sweeps.job("flash", 100.0), sweeps.job("cudnn", 60.0)], line(library="FA3", gpu="H100 SXM"))
    (row,) = found.rows
    assert (row.cell.result.label, row.same_library, row.same_gpu) == ("cudnn", False, False)
    assert "FA3: not measured here, compared with the fastest backend" in found.notes
    assert any("H100 SXM there, NVIDIA H200 here" in note for note in found.notes)


def test_only_the_same_problem_meets(beside):
    others = [line(causal="false"), line(dtype="fp8"), line(dtype="float16"), line(side="backward")]
    with pytest.raises(UserError, match=r"no figure in .* is of a shape in the sweep: that has b4 h16 s1024 d128"):
        beside([sweeps.job(bwd_us=None)], *others)
    assert len(beside([sweeps.job()], *others, line(dtype="bf16")).rows) == 2  # the backward and the short name


def test_columns_that_are_missing_stay_open(beside):
    found = beside([sweeps.job("flash")], "1024,200", "2048,300", head="seq_len,tflops")
    (row,) = found.rows
    assert (row.figure.tflops, row.same_gpu, found.figures) == (200.0, None, 2)


@pytest.mark.parametrize(
    ("head", "words"),
    [("seq_len,us", "has no column tflops"), ("batch,tflops", "has no column q_len or seq_len"), ("", "has no column")],
)
def test_a_file_of_another_kind_is_one_sentence(beside, head, words):
    with pytest.raises(UserError, match=words):
        beside([sweeps.job()], head=head)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    folder = sweeps.sweep(tmp_path / "s", [sweeps.job()])
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.csv"):
        compare(folder, published=tmp_path / "nowhere.csv")
    for name in ("binary.csv", "s"):
        with pytest.raises(UserError, match="cannot be read as CSV"):
            compare(folder, published=tmp_path / name)


def test_lines_that_cannot_be_used_are_named_and_counted(beside):
    wrong = [line(tflops="fast"), line(tflops="-3"), line(side="sideways"), line(tflops="nan"), line(tflops="")]
    found = beside([sweeps.job()], line(), *wrong, line(window="wide"))
    text = " ".join(found.notes)
    for words in ("line 3: could not convert", "line 4: tflops=-3", "line 5: pass=sideways", "3 more lines"):
        assert words in text
    assert len(found.rows) == 1


def test_what_a_terminal_would_obey_is_a_question_mark(beside):
    row = line(gpu="H200\x1b[31m", library="FA2 \u202eback").replace("a paper", "a \x9b2J paper")
    found = beside([sweeps.job("flash")], row)
    figure = found.rows[0].figure
    assert (figure.source, figure.gpu, figure.library) == ("a ?2J paper", "H200?[31m", "FA2 ?back")


def test_windows_and_deterministic_backwards_meet_their_own(beside):
    windowed = sweeps.case(window=128)
    fixed = {"options": {"deterministic": True}}
    records = [sweeps.job("flash", 100.0, 300.0), sweeps.job("flash", 50.0, 150.0, of=windowed)]
    found = beside(
        [*records, sweeps.job("flash", 100.0, 600.0, **fixed)],
        line(window="128"), line(side="backward", fixed="true"), line(side="backward", fixed="false"),
    )  # fmt: skip
    rows = {(row.figure.case["window"], row.figure.deterministic, row.figure.direction): row for row in found.rows}
    pairs = 4 * 16 * (128 * 129 // 2 + (1024 - 128) * 128)
    assert rows[128, False, "forward"].tflops == pytest.approx(4 * 128 * pairs / 50e-6 / 1e12)
    backward = 2.5 * 4 * 16 * 1024 * 1024 * 4 * 128 / 2 / 1e12
    assert rows[None, True, "backward"].tflops == pytest.approx(backward / 600e-6)
    assert rows[None, False, "backward"].tflops == pytest.approx(backward / 300e-6)
    assert len(found.rows) == 3
