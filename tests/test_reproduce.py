"""Published figures: the files of the package, the verdicts, the runs, and the command."""

import json
import math
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps

from attn_exp.commands.reproduce import main
from attn_exp.commands.run import main as run
from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.case.fields import case_from_config
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.core.sheet.render import text_of
from attn_exp.reproduce.confirmed import confirm, confirmed_page, records_of, sample
from attn_exp.reproduce.figures import choose, read_file, read_published, runs
from attn_exp.reproduce.judged import from_results, from_table, judge, verdict_of
from attn_exp.results.read import read_folder
from attn_exp.results.result import result_of
from attn_exp.sweep.product import parsed_combinations
from attn_exp.sweep.task_function import with_job

ROOT = Path(__file__).resolve().parent.parent
FIGURES = read_published()
FILE = """\
title: a paper
url: https://example.org
place: table 1
gpu: H200 SXM
counting: common
overrides: "dtype=bf16 batch=4 model.q_heads=16 model.head_dim=128 seq_len=1024 layout=bhsd"
libraries:
  FA2: {{backend: flash}}
  Other: {{cannot_run: it is nowhere}}
figures:
{figures}
"""


QUICK = ("device=cpu", "isolation=none", "tracker=none", "stopping.budget_s=0.05", "save_plots=false", "quiet=true")


def row(**changes):
    given = {"id": "one", "library": "FA2", "overrides": "causal=true", "pass": "forward", "tflops": 300} | changes
    return "  - " + json.dumps({key: value for key, value in given.items() if value is not None})


@pytest.fixture
def written(tmp_path):
    def write(*rows, name="paper.yaml", **changes):
        text = FILE.format(figures="\n".join(rows))
        for old, new in changes.items():
            text = "\n".join(new if line.startswith(f"{old}:") else line for line in text.splitlines())
        (tmp_path / "own").mkdir(exist_ok=True)
        (tmp_path / "own" / name).write_text(text)
        return tmp_path / "own"

    return write


def measured(*records):
    return from_results([result_of(record) for record in records])


def test_there_are_the_figures_that_were_asked_for():
    assert len(FIGURES) >= 200
    assert sum(one.case.window is not None for one in FIGURES) == 10
    assert sum(one.deterministic for one in FIGURES) == 4
    assert all(one.source.url.startswith("https://") and one.source.place for one in FIGURES)
    assert all(one.source.chip is not None for one in FIGURES)
    known = {path.stem for path in (conf_folder() / "backend").glob("*.yaml")}
    assert {one.backend for one in FIGURES} - {None} <= known
    assert len({one.name for one in FIGURES}) == len(FIGURES)


def test_decoding_by_cudnn_is_compared_as_time():
    figures = choose(FIGURES, "cudnn_decode_h200")
    assert [sum(one.case.q_len == queries for one in figures) for queries in (1, 8, 16)] == [16, 16, 16]
    (longest,) = choose(FIGURES, "cudnn_decode_h200/cudnn-b128-q8-kv131072")
    assert longest.value == (103506.986, "us") and longest.case.batch == 128 and longest.case.align == "bottom_right"
    assert all(one.case.causal == (one.case.q_len > 1) and one.tflops is None for one in figures)


def test_each_configuration_is_what_hydra_makes_of_its_overrides():
    # One figure of each source, dtype, window and setting; the others differ from one of these only in numbers.
    kinds = {
        (one.source.name, one.case.dtype, one.case.window, one.deterministic, one.case.value_dim): one
        for one in FIGURES
    }
    for one in kinds.values():
        config = resolved_config(compose_config([*one.words(), "device=cpu"], "s"))
        assert case_from_config(config) == one.case, one.name
        for key, value in one.settings.items():
            assert str(config[key]).lower() == value, (one.name, key)


def evidence_of(path, folder):
    """The passes in a table, or in an archive of records."""
    if path.suffix == ".csv":
        return from_table(path)
    with tarfile.open(path) as file:
        file.extractall(folder, filter="data")
    return from_results(read_folder(folder / path.name.removesuffix(".tar.xz")).results)


def test_statuses_follow_from_the_evidence(tmp_path):
    for name in {one.source.name for one in FIGURES}:
        figures = choose(FIGURES, name)
        evidence = figures[0].source.evidence
        kept = evidence_of(ROOT / evidence, tmp_path) if evidence else []
        for judged in judge(figures, kept):
            expected = judged.verdict or ("cannot_run" if judged.figure.backend is None else "not_run")
            assert judged.figure.status == expected, judged.figure.name


def test_our_rate_is_counted_as_theirs_and_judged_on_their_gpu_only(written):
    figures = read_published(
        written(row(tflops=300), row(id="us", tflops=None, time_us=120.0), row(id="no", library="Other"))
    )
    flops = 4 * 16 * 1024 * 1024 * 4 * 128 / 2
    ours, time, missing = judge(figures, measured(sweeps.job("flash", 100.0)))
    assert ours.ours == pytest.approx(flops / 100e-6 / 1e12)
    assert ours.ratio == pytest.approx(flops / 100e-6 / 1e12 / 300)
    assert (time.ours, time.ratio) == (pytest.approx(100.0), pytest.approx(1.2))
    assert math.log(time.high / time.low) == pytest.approx(2 * math.atanh(0.003), rel=1e-6)
    assert (time.verdict, missing.verdict, missing.said) == ("contradicted", None, "cannot be run: it is nowhere")
    elsewhere = judge(figures, measured(sweeps.job("flash", 100.0, environment=sweeps.H200 | {"gpu": "NVIDIA A100"})))
    assert (elsewhere[0].verdict, elsewhere[0].said) == (None, "another GPU: no verdict")
    assert elsewhere[0].ratio == pytest.approx(ours.ratio)
    failed = judge(figures, measured(sweeps.failed("unsupported", reason="no kernel for it")))
    assert (failed[0].verdict, failed[0].said) == (None, "unsupported")


def test_another_case_or_algorithm_is_not_it_and_other_conditions_are_told(written):
    figures = read_published(
        written(
            row(**{"pass": "backward"}),
            row(id="det", overrides="causal=true deterministic=true regime=burst", **{"pass": "backward"}),
        )
    )
    fixed = sweeps.job("flash", 100.0, 500.0, options={"deterministic": True})
    free = sweeps.job("flash", 100.0, 300.0, of=replace(sweeps.CASE, layout="bshd"))
    other = sweeps.job("flash", 10.0, 30.0, of=replace(sweeps.CASE, window=128))
    plain, det = judge(figures, measured(fixed, free, other, sweeps.job("cudnn", 1.0, 3.0)))
    assert (plain.measured.time_us, det.measured.time_us) == (300.0, 500.0)
    assert plain.differs == "layout bshd, not bhsd"
    assert det.differs == "regime sustained, not burst"


@pytest.mark.parametrize(("name", "commands"), [("flash_attention_1893_h100", 4), ("cudnn_decode_h200", 1)])
def test_a_run_composes_to_the_figures_cases(name, commands):
    """The node `figure` and its interpolations are what Hydra makes of them; each run starts processes anew."""
    figures = choose(FIGURES, name)
    needed = runs(figures, [], "s")
    assert len(needed) == commands
    for arguments in needed:
        for words in parsed_combinations(arguments[1:]):
            config = resolved_config(compose_config([*words, "device=cpu"], "s"))
            assert case_from_config(config) in {one.case for one in figures}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tflops": None}, "figure one: it has no unit: write tflops=... or time_us=..."),
        ({"library": "FA9"}, "its library FA9 is not among libraries: did you mean 'FA2'?"),
        ({"overrides": "causal=true colour=red"}, "its override colour=red is none that a figure may have"),
        ({"overrides": "batch=0 causal=true"}, "batch=0 is not a whole number"),
        ({"overrides": ""}, "its overrides lack causal"),
        ({"speed": 3}, "contains unknown field `speed`"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(written, changes, words):
    folder = written(row(**changes))
    with pytest.raises(UserError) as refused:
        read_file(folder / "paper.yaml")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_command_lists_and_judges(written, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert f"{len(FIGURES)} figures of" in capsys.readouterr().out
    folder = written(row(), row(id="two", overrides="causal=true seq_len=2048"))
    sweeps.write(tmp_path / "multirun" / "mine", [sweeps.job("flash", 57.5)])
    capsys.readouterr()
    assert main(["paper", f"published={folder}", "sweep=mine", "format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [one["verdict"] for one in rows] == ["reproduced", "not measured"]
    with tarfile.open("mine.tar.xz", "w:xz") as archive:
        archive.add("multirun/mine", "mine")
    assert main(["paper", f"published={folder}", "sweep=mine.tar.xz", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    assert rows[0]["low"] < rows[0]["ratio"] < rows[0]["high"]
    assert main(["paper/two", f"published={folder}", "dry_run=true", "device=cpu"]) == 0
    assert "seq_len=2048" in capsys.readouterr().out


def test_it_measures_what_is_needed(written, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = "batch=1 model.q_heads=2 model.kv_heads=2 model.head_dim=16 dtype=fp32"
    folder = written(
        row(overrides=f"{small} seq_len=32 causal=true"), row(id="two", overrides=f"{small} seq_len=64 causal=false")
    )
    words = ["device=cpu", "isolation=none", "tracker=none", "stopping.budget_s=0.05", "save_plots=false", "quiet=true"]
    assert main(["paper", f"published={folder}", *words]) == 0
    out = capsys.readouterr().out
    assert "of 2 figures 0 reproduced, 0 beside, 0 faster at full clock, 0 contradicted, 2 without" in " ".join(
        out.split()
    )
    assert out.count("another GPU: no verdict") == 2
    assert "H200 SXM there" in out


def test_a_burst_contradicts_no_figure_by_what_its_clock_explains():
    assert verdict_of(1.2, 0.01, 0.0, "burst") == "faster_at_full_clock"
    assert verdict_of(1.2, 0.01, 0.0, "sustained") == verdict_of(1 / 1.2, 0.01, 0.0, "burst") == "contradicted"
    assert verdict_of(1.7, 0.01, 0.0, "burst") == "contradicted"


def test_a_sweep_of_another_host_is_confirmed_or_its_differences_are_named():
    # A library that this backend does not call explains nothing.
    versions = sweeps.H200["versions"] | {"flash-attn-3": "3.0.0"}
    other = sweeps.H200 | {"gpu_uuid": "GPU-2", "driver": "590.1", "power_limit_w": 600.0, "versions": versions}
    cases = [replace(sweeps.CASE, batch=batch) for batch in (1, 2, 3, 4, 5, 6)]
    there = [result_of(sweeps.job("flash", 100.0, None, of=case)) for case in cases]
    # Equal; within both intervals; beyond 3 %; beyond 10 %; not known well; not known well but beyond 10 %.
    times = ((100.5, 0.003), (98.0, 0.025), (105.0, 0.003), (80.0, 0.003), (100.0, 0.1), (200.0, 0.1))
    here = [
        result_of(sweeps.job("flash", us, None, of=case, half=half, environment=other))
        for case, (us, half) in zip(cases, times, strict=True)
    ]
    rows = confirm(there, here)
    assert [row.verdict for row in rows] == [
        "confirmed", "confirmed", "beside", "contradicted", "too uncertain", "contradicted",
    ]  # fmt: skip
    assert rows[3].low < 1.25 < rows[3].high and rows[3].ratio == pytest.approx(1.25)
    assert [bool(row.differs) for row in rows] == [False, False, True, True, True, True]
    assert {"power_limit_w 700 -> 600", "driver 580.1 -> 590.1", "another card"} == set(rows[2].differs.split("; "))
    text = text_of(confirmed_page(rows))
    assert "of 6 passes 2 confirmed" in text and "3 of 6 within 3 %" in text
    failed = result_of(sweeps.failed("out_of_memory", of=cases[0]))
    assert [row.verdict for row in confirm(there[:2], [failed])] == ["out_of_memory here", "not measured"]
    with pytest.raises(
        UserError, match="none of these passes was measured here: batch is 1 in the old and 2 in the new"
    ):
        confirm(there[:1], here[1:2])
    regime = "burst" if there[0].measuring.regime != "burst" else "sustained"
    (unlike,) = confirm(
        there[:1], [result_of(sweeps.job("flash", 100.0, None, of=cases[0], measuring={"regime": regime}))]
    )
    assert unlike.verdict == "measured differently" and "regime" in unlike.differs
    (alike,) = confirm(there[:1], [result_of(sweeps.job("flash", 150.0, None, of=cases[0]))])
    assert (alike.verdict, alike.differs) == ("contradicted", "nothing differs that the records have")


def test_a_sample_of_a_sweep_has_all_backends_and_is_the_same_each_time():
    cases = [replace(sweeps.CASE, batch=batch) for batch in range(1, 9)]
    results = [result_of(sweeps.job(name, of=case)) for case in cases for name in ("flash", "math")]
    chosen = sample(results, 8)
    assert chosen == sample(results, 8) and {one.label for one in chosen} == {"flash", "math"}
    assert sample(results, None) == sample(results, 99) == results


@pytest.fixture(scope="module")
def one_sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    small = ["batch=1,2", "model.q_heads=2", "model.kv_heads=2", "model.head_dim=16", "seq_len=32", "dtype=fp32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["-m", *small, *QUICK, "backend=flash,math", "passes=[forward]", "sweep=one"]) == 0
    return folder / "multirun/one"


@pytest.fixture
def measured_sweep(one_sweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(one_sweep, tmp_path / "multirun/one")


def test_a_sweep_is_measured_again_with_the_configurations_of_its_records(measured_sweep, capsys):
    with tarfile.open("one.tar.xz", "w:xz") as archive:
        archive.add(measured_sweep, "one")
    words = ["one.tar.xz", "rows=3", *QUICK]
    assert main([*words, "dry_run=true"]) == 0
    assert "3 jobs: 3 would run" in capsys.readouterr().out
    shown = []
    for _ in range(2):  # The second takes the records of the first.
        assert main([*words, "format=json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1] and len(shown[0]["rows"]) == 3
    again = Path("multirun/reproduce-one")
    jobs = {path.parent.name for path in again.glob("*/record.json")}
    assert len(jobs) == 3 and jobs < {path.parent.name for path in measured_sweep.glob("*/record.json")}
    assert "reproduce one.tar.xz rows=3" in (again / "command.txt").read_text()
    (measured_sweep / next(iter(jobs)) / "record.json").write_text("{")
    assert main(["one", "sweep=reproduce-one", "format=json"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert len(part["rows"]) == 2 and "skipped: " in part["notes"][-1]
    assert main(["one.tar.xz", "sweep=one.tar.xz", "format=json"]) == 0
    assert {row["ratio"] for row in json.loads(capsys.readouterr().out)["rows"]} == {1.0}
    whole = Path("one.tar.xz").read_bytes()
    for place in range(100, len(whole) - 100, len(whole) // 10):
        Path("one.tar.xz").write_bytes(whole[:place] + b"damaged" + whole[place + 7 :])
        assert main(["one.tar.xz", "sweep=reproduce-one"]) == 2
        assert "one.tar.xz is no archive of records, or damaged" in capsys.readouterr().err


@pytest.mark.parametrize("archive", sorted((ROOT / "results").glob("*/*/*.tar.xz")), ids=lambda path: path.name)
def test_every_kept_sweep_can_be_measured_again(archive, tmp_path):
    # On a CPU, which most of them do not fit; a record that cannot be composed is another mistake.
    with records_of(str(archive)) as there:
        for result in sample(there.results, 1):
            config = compose_config(["device=cpu", "tracker=none"], "again")
            request = request_from_config(resolved_config(with_job(config, result.record().request)), [])
            assert (request.case, request.backend) == (result.case, result.record().request.backend)


@pytest.mark.parametrize("place", ["model", "timer"])
def test_a_variable_in_a_record_of_somebody_else_is_not_filled_in(place, measured_sweep, capsys):
    for path in measured_sweep.glob("*/record.json"):
        record = json.loads(path.read_text())
        record["request"]["config"][place]["name"] = "${oc.env:HOME}"
        path.write_text(json.dumps(record))
    assert main(["one", *QUICK]) == 2
    assert "its record has ${...}, which would be filled in here" in capsys.readouterr().err


def test_what_a_record_of_somebody_else_names_is_neither_imported_nor_written_to(measured_sweep, capsys):
    for number, path in enumerate(sorted(measured_sweep.glob("*/record.json"))):
        record = json.loads(path.read_text())
        config = record["request"]["config"]
        config["tracker"] = {"name": "mlflow", "uri": "sqlite:///theirs.db"}
        config["profiler"] = {"own": {"_target_": "own.Profiler"}}
        config["stopping"]["patience_s"] = 1  # Of an older version.
        config["backend"]["_target_"] = "own.Backend"
        (record["request"]["backend"] if number == 0 else config["inputs"])["_target_"] = "own.Other"
        path.write_text(json.dumps(record))
    assert main(["multirun/one", *QUICK]) == 2
    assert "its record names own.Other, which is not of this package" in capsys.readouterr().err
    assert not Path("theirs.db").exists() and not Path("multirun/reproduce-one").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.tar.xz"], "none.tar.xz is no archive of records"),
        (["none.tar.xz", "rows=0"], "rows=0 is no number of rows"),
        ([".", "mask=full"], "mask= is what the sweep's records say"),
        (["."], "has no measured job"),
        (["nobody"], "there is no figure or source 'nobody'"),
        (["cudnn_frontend_h200", "where=seq_len > 1e9"], "matches none of the 56 figures"),
        (["cudnn_frontend_h200", "sweep=none"], "there is no sweep 'none'"),
        (["cudnn_frontend_h200", "sweep=a.csv"], "a.csv cannot be read as CSV"),
        (["published=nowhere"], "there are no figures in nowhere"),
        (["format=xml"], "format=xml is not known: choose one of table"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert len(err.splitlines()) == 1
    assert out == ""
