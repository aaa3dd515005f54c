"""What `explain` finds; what it says of that is in tests/golden."""

import re
import sqlite3
from dataclasses import replace

import pytest
import sweeps
from cli import without_progress
from explained import first, job

from attn_exp.commands.explain import main
from attn_exp.commands.log import main as log_main
from attn_exp.core.record.record import CompileRecord
from attn_exp.core.record.request import Compile
from attn_exp.explain.page import keep_pages
from attn_exp.results.read import read_folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The sweep `first` of `explained`, and another."""
    sweeps.write(tmp_path / "multirun" / "first", first())
    sweeps.write(tmp_path / "multirun" / "other", [job("flash", 70.0)])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "multirun" / "first"


def page(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_the_page_of_a_job_that_failed_names_its_log_if_it_has_one(here, capsys):
    log = next(here.glob("fa3-*")) / "worker.log"
    for content in ("", "printed"):
        log.write_text(content)
        assert ("worker.log" in page(capsys, "first/fa3")) == bool(content)


def test_a_sweep_s_page_has_its_cases_in_order_and_names_what_can_be_typed(here, capsys):
    cases = [sweeps.case(seq_len=length) for length in (8192, 512, 4096, 1024, 128, 2048, 256)]
    sweeps.write(here.parent / "lengths", [job("flash", 100.0, of=case) for case in cases])
    text = page(capsys, "lengths")
    assert re.findall(r" s(\d+) ", text) == ["128", "256", "512", "1024", "2048", "4096"]
    assert "1 of the 7 cases are left out here; all of them: attn-exp compare multirun/lengths" in text
    (command,) = re.findall(r"attn-exp explain (multirun/lengths/flash-\S+)", text)
    assert " s128 " in page(capsys, command)


def test_a_sweep_s_page_has_the_passes_of_all_its_jobs(here, capsys):
    sweeps.write(here.parent / "mixed", [sweeps.job("flash", 70.0, None), sweeps.job("math", 80.0, 90.0)])
    lines = [re.split(r"  +", line) for line in page(capsys, "mixed").splitlines()]
    assert ["backend", "status", "fwd us", "fwd TFLOPS", "bwd us", "bwd TFLOPS"] in lines
    assert {line[0]: len(line) for line in lines if "ok" in line} == {"flash": 4, "math": 6}


def test_a_sweep_s_page_names_the_records_that_it_lacks(here, capsys):
    broken = next(here.glob("flash-*")) / "record.json"
    broken.write_bytes(broken.read_bytes()[:100])
    text = page(capsys, "first")
    assert f"skipped: multirun/first/{broken.parent.name}/record.json is not a record" in text.replace("\n  ", " ")


def test_a_sweep_that_ran_compiled_shows_graphs_breaks_and_recompilations_of_every_backend(here, capsys):
    assert "graphs" not in page(capsys, "first") and "torch.compile" not in page(capsys, "first/flash")
    counts = {"forward/graphs": 2.0, "forward/graph_breaks": 1.0, "forward/recompilations": 3.0}
    made = job("flash", 90.0, compile=Compile(mode="default"))
    reason = "call to a C function that Dynamo cannot trace"
    whole = CompileRecord(graphs=2, breaks={reason: 1}, recompilations=3)
    one = job("flex", 80.0)
    jobs = [
        job("flash", 70.0),
        replace(made, metrics=made.metrics | counts, compiled=whole),
        replace(one, metrics=one.metrics | {**dict.fromkeys(counts, 0.0), "forward/graphs": 1.0}),
    ]
    sweeps.write(here.parent / "compiled", jobs)
    lines = [re.split(r"  +", line) for line in page(capsys, "compiled").splitlines()]
    assert ["backend", "status", "fwd us", "fwd TFLOPS", "graphs", "breaks", "recompiled"] in lines
    assert {line[0]: line[4:] for line in lines if "ok" in line} == {
        "flash": [], "flex": ["1", "0", "0"], "flash+default": ["2", "1", "3"]
    }  # fmt: skip
    text = page(capsys, f"compiled/{made.request.job}")
    assert f"Under torch.compile: graphs 2, breaks 1, recompilations 3\ngraph break (1): {reason}\n" in text


def test_every_way_of_naming_a_job_finds_it(here, capsys):
    folder = next(here.glob("flash-*"))
    wanted = page(capsys, "first/flash")
    for word in (str(folder), f"{folder}/", f"first/{folder.name}"):
        assert page(capsys, word).splitlines()[3:] == wanted.splitlines()[3:]
    assert "forward: 70 us" in page(capsys, "other")
    assert "forward: 70 us" in page(capsys, "multirun/other")
    assert "forward: 120 us" in page(capsys, "first/flash", f"folder={here.parent}")


def test_an_mlflow_run_is_found_with_its_rivals(here, capsys):
    assert log_main(["first"]) == 0
    capsys.readouterr()
    with sqlite3.connect("mlruns/mlflow.db") as database:
        own = "SELECT tags.run_uuid FROM tags JOIN runs USING (run_uuid) WHERE name LIKE ? AND tags.value = ?"
        (run,) = database.execute(own, ("flash %", "job")).fetchone()
        (sweep,) = database.execute(own, ("%", "sweep")).fetchone()
    text = page(capsys, run)
    assert "forward: 120 us" in text and "3 of 3" in text
    assert main([f"{99:032x}"]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert main([sweep]) == 2
    assert "is not a job's but of kind sweep: give a job's run, or the sweep's name first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fist"], "there is no sweep 'fist': did you mean 'first'?"),
        (["first/flsh"], "there is no job 'flsh'"),
        (["first/f"], "2 jobs begin with 'f'"),
        (["first", "other"], "explain takes one JOB_OR_SWEEP, and 2 were given: attn-exp explain SWEEP/JOB"),
        (["folder=x"], "no JOB_OR_SWEEP was given: write one, for example attn-exp explain "),
        (["first", "folde=x"], "there is no option 'folde=': did you mean 'folder'?"),
        (["first", "folder=nowhere"], "there is no sweep 'first'"),
        (["0" * 32], "there is no database"),
        (["0" * 32, "uri=http://nowhere"], "Failed to resolve 'nowhere'; or give the job's folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistyped_word_is_one_sentence(here, capsys, arguments, words):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(without_progress(said.strip())) == 1


def test_the_pages_of_profiled_jobs_are_kept_beside_their_profiles(here):
    for name in ("flash", "fa3"):
        (next(here.glob(f"{name}-*")) / "profiles").mkdir()
    (name, (kept,)), *others = keep_pages(read_folder(here).results).items()
    assert not others and name == next(here.glob("flash-*")).name
    assert kept.name == "explain.txt" and "forward: 3 of 3" in kept.read_text()
