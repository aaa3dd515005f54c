"""hydra/sweeper=optuna, the plugin itself, with a time and with a duel as its objective. The times are made up."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import attn_exp
from attn_exp.commands import run as run_command
from attn_exp.config.check import explain_error
from attn_exp.core.errors import UserError
from attn_exp.core.record.file import write_record
from attn_exp.core.record.record import PassRecord, Timing
from attn_exp.run import duel
from attn_exp.run.session import Session
from attn_exp.run.worker import Outcome

CUSTOM = Path(__file__).resolve().parent.parent / "examples/custom_backend"
# A grid, so that every value is tried once, whatever Optuna draws.
SEARCH = ("hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
ROWS = ("backend=sliced", "backend.rows=choice(8,16,64)")
QUICK = {"device": "cpu", "seq_len": 64, "dtype": "fp32", "passes": ["forward"], "tracker": "none"}
ROUNDS = 7


def made_up_us(request):
    """Slices of 16 rows are the fastest; those of 64 are as slow as flash, the default's 32 in between."""
    return {8: 90.0, 16: 60.0, 32: 80.0, 64: 100.0}.get(request.backend.get("rows"), 100.0)


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """Search by calling the returned function: what Optuna wrote, the measured requests, and what was printed."""
    measured = []

    def submit(session, request, config):
        session.open(config())
        measured.append([request])
        return made_up_us(request)

    def measure(context, requests, gpus, *_):
        measured.append(requests)
        for request in requests:
            us = made_up_us(request)
            drawn = tuple(us * (1 + 0.001 * (index % 3)) for index in range(ROUNDS))
            timing = Timing(timer="cpu", l2="warm", times_us=drawn, rounds=tuple(range(ROUNDS)), stop_reason="precise")
            made = sweeps.job("sliced", us, None, device="cpu")
            fails = request.backend.get("rows") == 8
            record = replace(made, request=request, passes={"forward": PassRecord(timings=(timing,))})
            folder = context.folder / request.job
            folder.mkdir()
            write_record(replace(record, status="inaccurate", reason="out is off") if fails else record, folder)
        return Outcome(context.folder)

    def search(*overrides, **choices):
        attn_exp.run(*SEARCH, *overrides, config_dir=CUSTOM / "conf", sweep="tuned", **QUICK, **choices)
        return OmegaConf.to_container(OmegaConf.load(tmp_path / "multirun/tuned/optimization_results.yaml")), measured

    monkeypatch.setattr(Session, "submit", submit)
    monkeypatch.setattr(duel, "_measure", measure)
    monkeypatch.setattr(duel, "plot_ratios", lambda *_: None)
    monkeypatch.setattr(run_command, "start_ahead", lambda worker: None)
    monkeypatch.chdir(tmp_path)
    return search


def test_a_search_by_time_finds_the_fastest_value(searched):
    best, measured = searched(*ROWS)
    assert best == {"name": "optuna", "best_params": {"backend.rows": 16}, "best_value": 60.0}
    assert sorted(request.backend["rows"] for (request,) in measured) == [8, 16, 64]


def test_a_search_by_duels_finds_the_fastest_value_and_what_is_wrong_wins_nothing(searched, capsys):
    best, measured = searched(*ROWS, rival="sliced")
    assert best["best_params"] == {"backend.rows": 16} and best["best_value"] == pytest.approx(60 / 80)
    # The default on one side, what is tried on the other; all else is the same.
    assert [first.backend["rows"] for first, _ in measured] == 3 * [32]
    assert sorted(second.backend["rows"] for _, second in measured) == [8, 16, 64]
    assert all(first.case == second.case and first.measuring == second.measuring for first, second in measured)
    out, err = capsys.readouterr()
    assert out == "" and "backend=sliced backend.rows=16: 0.75 of sliced's time, best so far 0.75" in err
    assert "backend=sliced backend.rows=8: unknown share of sliced's time" in err
    folders = sorted(Path("multirun/tuned").glob("duel-*"))
    assert len(folders) == 3 and not list(Path("multirun").glob("duel-*"))
    commands = [(folder / "command.txt").read_text() for folder in folders]
    assert all(
        "attn-exp duel a=sliced b=sliced b.rows=" in command and "--config-dir" in command for command in commands
    )


def test_the_example_tunes_an_option(searched, capsys):
    words = [
        *SEARCH[1:],
        "backend.rows=choice(16,32)",
        *(f"{key}={value}" for key, value in {**QUICK, "passes": "[forward]"}.items()),
    ]
    runpy.run_path(str(CUSTOM.parent / "tune_options.py"))["main"](words)
    out, _ = capsys.readouterr()
    assert "backend.rows: 16\n" in out and "best_value: 0.75" in out


def test_where_the_plugin_is_missing_the_message_says_what_to_install():
    # The message of Hydra 1.3.
    text = "In 'config': Could not find 'hydra/sweeper/optuna'\n\nAvailable options in 'hydra/sweeper':\n\tbasic"
    said = explain_error(ConfigCompositionException(text), lambda: "")
    assert said == "hydra/sweeper=optuna needs hydra-optuna-sweeper: pip install 'attn_exp[optuna]'"


def test_a_rival_without_a_search_is_refused_with_what_to_type(searched):
    with pytest.raises(UserError, match=r"add -m hydra/sweeper=optuna, or .*attn-exp duel a=flash b=\.\.\."):
        attn_exp.run("backend=math", "rival=flash", sweep="tuned", **QUICK)
    with pytest.raises(UserError, match="backend=flsh does not exist: did you mean 'flash'"):
        searched(*ROWS, rival="flsh")
