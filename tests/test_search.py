"""hydra/sweeper=optuna, the plugin itself. The times are made up."""

import runpy
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import attn_exp
from attn_exp.commands import run as run_command
from attn_exp.config.check import explain_error
from attn_exp.execution.session import Session

CUSTOM = Path(__file__).resolve().parent.parent / "examples/custom_backend"
# A grid, so that every value is tried once, whatever Optuna draws.
SEARCH = ("hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
ROWS = ("backend=sliced", "backend.rows=choice(8,16,64)")
QUICK = {"device": "cpu", "seq_len": 64, "dtype": "fp32", "passes": ["forward"], "tracker": "none"}


def made_up_us(request):
    """Slices of 16 rows are the fastest; those of 64 are as slow as flash, the default's 32 in between."""
    return {8: 90.0, 16: 60.0, 32: 80.0, 64: 100.0}.get(request.backend.get("rows"), 100.0)


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """Search by calling the returned function: what Optuna wrote, the measured requests, and what was printed."""
    measured = []

    def submit(session, requests, config):
        session.open(config())
        measured.extend(requests)
        return made_up_us(requests[-1])

    def search(*overrides, **choices):
        attn_exp.run(*SEARCH, *overrides, config_dir=CUSTOM / "conf", sweep="tuned", **QUICK, **choices)
        return OmegaConf.to_container(OmegaConf.load(tmp_path / "multirun/tuned/optimization_results.yaml")), measured

    monkeypatch.setattr(Session, "submit", submit)
    monkeypatch.setattr(run_command, "start_ahead", lambda worker: None)
    monkeypatch.chdir(tmp_path)
    return search


def test_a_search_by_time_finds_the_fastest_value(searched):
    best, measured = searched(*ROWS)
    assert best == {"name": "optuna", "best_params": {"backend.rows": 16}, "best_value": 60.0}
    assert sorted(request.backend["rows"] for request in measured) == [8, 16, 64]


def test_the_example_tunes_an_option(searched, capsys):
    words = [
        *SEARCH[1:],
        "backend.rows=choice(16,32)",
        *(f"{key}={value}" for key, value in {**QUICK, "passes": "[forward]"}.items()),
    ]
    runpy.run_path(str(CUSTOM.parent / "tune_options.py"))["main"](words)
    out, _ = capsys.readouterr()
    assert "backend.rows: 16\n" in out and "best_value: 60.0" in out


def test_a_missing_plugin_is_an_error_that_says_what_to_install():
    # The message of Hydra 1.3.
    text = "In 'config': Could not find 'hydra/sweeper/optuna'\n\nAvailable options in 'hydra/sweeper':\n\tbasic"
    said = explain_error(ConfigCompositionException(text))
    assert said == "hydra/sweeper=optuna needs hydra-optuna-sweeper: pip install 'attn_exp[optuna]'"
