"""attn_exp.run from Python: what it returns, says and leaves behind; choices as Python objects."""

import math
from pathlib import Path

import pytest
import sweeps
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import attn_exp
from attn_exp.api.sweep import Sweep
from attn_exp.api.timed import overrides_of
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.plots.all import KINDS
from attn_exp.sweep.task_function import SessionTask

# Small, on the CPU, in this process, where torch is imported once.
QUICK = {
    "device": "cpu",
    "seq_len": 32,
    "model": {"q_heads": 2, "kv_heads": 2, "head_dim": 16},
    "dtype": "fp32",
    "stopping": {"min_rounds": 2, "max_rounds": 2, "budget_s": 0.01},
    "save_plots": False,
    "tracker": "none",
    "isolation": "none",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return a sweep that was run here, the rows as they came, and what was printed."""
    rows, folder = [], tmp_path_factory.mktemp("ran") / "first"
    sweep = attn_exp.run(
        "backend=math,eager", batch=[1, 2], sweep="first", folder=folder, each=rows.append, quiet=True, **QUICK
    )
    return sweep, rows, folder


def test_a_run_returns_its_sweep_and_hands_out_rows_as_they_come(ran):
    sweep, rows, folder = ran
    assert isinstance(sweep, Sweep) and sweep.name == "first" and Path(sweep.place) == folder
    assert [(row.label, row.case.batch) for row in rows] == [("math", 1), ("eager", 1), ("math", 2), ("eager", 2)]
    assert {row.status for row in sweep} == {"ok"} and len(sweep) == 4
    assert sorted(row.record().request.job for row in rows) == [row.job for row in sweep]
    assert "batch=1,2" in (folder / "command.txt").read_text()


def test_a_run_again_measures_nothing_and_prints_nothing_on_standard_output(ran, capsys):
    sweep, _, folder = ran
    before = {row.job: row.finished_at for row in sweep}
    rows = []
    again = attn_exp.run("backend=math,eager", batch=[1, 2], sweep="first", folder=folder, each=rows.append, **QUICK)
    out, err = capsys.readouterr()
    assert {row.job: row.finished_at for row in again} == before and len(rows) == 4
    assert out == "" and "4 of 4 jobs were done before and are kept" in err


def test_hydra_of_the_program_around_it_is_left_as_it_was(ran):
    _, _, folder = ran
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        around = GlobalHydra.instance().hydra
        attn_exp.run("backend=math", sweep="first", folder=folder, quiet=True, **QUICK)
        assert GlobalHydra.instance().hydra is around
        assert compose("config", ["batch=7"]).batch == 7


def test_a_dry_run_prints_the_jobs_and_returns_an_empty_sweep(tmp_path, capsys):
    sweep = attn_exp.run("backend=math", dry_run=True, sweep="dry", folder=tmp_path / "dry", **QUICK)
    assert len(sweep) == 0 and "1 job: 1 would run" in capsys.readouterr().out
    assert not (tmp_path / "dry").exists()
    with pytest.raises(UserError, match="has no results yet"):
        _ = sweep.answer


@pytest.mark.parametrize(
    ("overrides", "choices", "message"),
    [
        (["backend=maths"], {}, "backend=maths does not exist: did you mean 'math'"),
        ([], {"batch": []}, r"batch=\[\] has no value"),
        ([], {"batch": object}, "batch=<class 'object'> is a type: give text, a number"),
        (["backend=math"], {"passes": ["sideways"]}, "passes has 'sideways'"),
        (["backend=math", "seq_lenn=8"], {}, "seq_len"),
        (["batch=1"], {"batch": [2]}, "batch is given as text and as a keyword"),
    ],
)
def test_a_mistake_is_raised_in_one_sentence(tmp_path, overrides, choices, message):
    with pytest.raises(UserError, match=message):
        attn_exp.run(*overrides, sweep="wrong", folder=tmp_path / "wrong", **{**QUICK, **choices})


def test_another_sweeper_gets_the_time_of_each_job_as_its_objective(tmp_path, monkeypatch, capsys):
    """As hydra/sweeper=optuna does, which asks for one job after another."""
    told = []
    run_one = SessionTask.__call__

    def listening(task, config):
        told.append(run_one(task, config))
        return told[-1]

    monkeypatch.setattr(SessionTask, "__call__", listening)
    choices = {**QUICK, "folder": tmp_path / "s"}
    rows = []
    attn_exp.run("hydra/sweeper=basic", "backend=math,flash", "softcap=null,2", sweep="s", each=rows.append, **choices)
    assert [row.status for row in rows] == ["ok", "unsupported", "ok", "unsupported"]
    times = [sum(row.metrics.get(f"{name}/time_us", math.inf) for name in ("forward", "backward")) for row in rows]
    assert told == times and "[4/4] unsupported" in capsys.readouterr().err


def test_an_error_of_a_reader_of_rows_ends_the_sweep_and_keeps_the_rows(tmp_path):
    def stop(row):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        attn_exp.run("backend=math", batch=[1, 2], sweep="s", folder=tmp_path / "s", each=stop, quiet=True, **QUICK)
    assert len(attn_exp.load(tmp_path / "s")) == 1


def test_choices_are_written_as_on_the_command_line():
    given = {
        "batch": [1, 8],
        "backend": "flash,math",
        "causal": True,
        "window": None,
        "passes": ["forward"],
        "lengths": [[512, 1536], (8, 8)],
        "model": {"head_dim": 64, "q_heads": [2, 4]},
        "stopping.budget_s": 0.5,
        "columns": ("a", "b"),
        "folder": Path("it's here"),
    }
    assert overrides_of(given) == [
        "batch=1,8",
        "backend=flash,math",
        "causal=true",
        "window=null",
        "passes=[forward]",
        "lengths=[512,1536],[8,8]",
        "model.head_dim=64",
        "model.q_heads=2,4",
        "stopping.budget_s=0.5",
        "columns=[a,b]",
        "folder='it\\'s here'",
    ]


def test_a_dtype_of_pytorch_and_a_number_of_numpy_are_choices():
    import numpy
    import torch

    assert overrides_of({"dtype": [torch.bfloat16, torch.float32], "batch": numpy.int64(8)}) == [
        "dtype=bf16,fp32",
        "batch=8",
    ]


# Needs what these records lack: measured ceilings, several samples.
UNDRAWN = ("bandwidth", "roofline", "samples")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep of made-up records, in which cudnn is faster everywhere."""
    folder = tmp_path_factory.mktemp("made") / "made"
    jobs = [
        sweeps.job(name, us * length / 1024, us * 2 * length / 1024, of=sweeps.case(seq_len=length))
        for name, us in (("flash", 100), ("cudnn", 80))
        for length in (1024, 2048, 4096)
    ]
    sweeps.sweep(folder, jobs)
    return attn_exp.load(folder)


def test_a_sweep_says_its_answer(made):
    assert made.answer.lead.over == "flash" and made.answer.lead.value == pytest.approx(1.25)
    (headline,) = made.answer.headline()
    assert made._repr_html_().index(headline) < made._repr_html_().index("<table>")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_plot_is_drawn_and_saved(made, tmp_path, kind):
    if kind in UNDRAWN:
        with pytest.raises(UserError, match=f"the results of made give no plot {kind}"):
            made.plot(kind)
        return
    chart = made.plot(kind)
    assert chart.name == kind and chart._repr_svg_().startswith("<svg")
    assert [path.name for path in chart.save(tmp_path / "new")] == [f"{kind}.svg", f"{kind}.png"]


def test_a_report_is_written_in_the_format_of_its_ending(made, tmp_path):
    assert "<html" in made.report(tmp_path / "report.html").read_text()
    assert made.report(tmp_path / "report.md").read_text().count("cudnn") > 3
    with pytest.raises(UserError, match="has none of the endings"):
        made.report(tmp_path / "report.docx")
    with pytest.raises(UserError, match="cannot write"):
        made.report(tmp_path / "missing" / "report.md")
