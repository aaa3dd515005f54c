"""Hydra's command line as we read it: it answers as `hydra.main` does, and neither reads nor sets a variable for it."""

import contextlib
import io
import os
import subprocess
import sys

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins

from attn_exp.config.compose import compose_config, prepare_hydra
from attn_exp.config.hydra_main import hydra_main
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError

QUESTIONS = [
    ["--help"],
    ["--hydra-help"],
    ["--cfg", "job"],
    ["--cfg", "job", "--resolve", "sweep=s"],
    ["--cfg", "job", "--package", "model"],
    ["--info", "defaults-tree"],
    ["-sc", "query=bash"],
]


@pytest.fixture(autouse=True)
def _clear():
    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


def printed(function):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        function()
    return out.getvalue()


@pytest.mark.parametrize("arguments", QUESTIONS, ids=" ".join)
def test_a_question_is_answered_as_by_hydra(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["attn-exp", *arguments])
    monkeypatch.setenv("COMP_LINE", "attn-exp backend=fl")
    prepare_hydra("a_sweep")
    theirs = printed(hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(id))
    ours = printed(lambda: hydra_main(arguments, id, "a_sweep"))
    # Hydra numbers no job here, and names it by the task function's module, which the configuration overrides.
    assert theirs
    # Lines of the help that are too long for a terminal are wrapped.
    assert ours.split() == theirs.split() if "--help" in arguments else ours == theirs


@pytest.mark.parametrize(
    ("arguments", "modes"),
    [
        ([], ["RUN"]),
        (["-m", "hydra/sweeper=basic", "batch=1,2"], ["MULTIRUN"] * 2),
        (["+experiment=table", "hydra.mode=RUN"], ["RUN"]),
        (["-m", "hydra.mode=RUN", "hydra/sweeper=basic"], ["MULTIRUN"]),
    ],
    ids=str,
)
def test_the_mode_is_the_flag_s_or_the_configuration_s(arguments, modes):
    heard = []
    hydra_main(arguments, lambda config: heard.append(HydraConfig.get().mode.name), "a_sweep")
    assert heard == modes


def test_all_configurations_of_a_command_have_one_sweep_and_it_can_be_named():
    heard = []
    for arguments in (["batch=1,2"], ["sweep=mine"]):
        hydra_main(["-m", "hydra/sweeper=basic", *arguments], lambda config: heard.append(config.folder), "by_default")
    assert heard == ["multirun/by_default", "multirun/by_default", "multirun/mine"]
    assert compose_config([], "another").sweep == "another"


@pytest.mark.parametrize("arguments", [["backend=flsh"], ["--cfg", "job", "bach=1"], ["--nope"], ["=1"]], ids=str)
def test_a_mistake_is_raised_and_no_variable_of_hydra_is_set(arguments, capsys):
    before = dict(os.environ)
    with pytest.raises(UserError):
        hydra_main(arguments, id, "a_sweep")
    assert capsys.readouterr() == ("", "")
    assert dict(os.environ) == before
    assert not GlobalHydra.instance().is_initialized()


def test_our_sweeper_refuses_the_jobs_of_another_program():
    with pytest.raises(UserError, match="choose hydra/sweeper=basic"):
        hydra_main(["-m", "batch=1,2"], id, "a_sweep")


def test_hydra_finds_the_sweeper_and_other_programs_import_nothing_of_ours():
    assert "hydra_plugins.attn_exp.ProductSweeper" in Plugins.instance().class_name_to_class
    probe = (
        "import sys; from hydra.core.plugins import Plugins; Plugins.instance(); "
        "print([name for name in sys.modules if 'attn_exp' in name])"
    )
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert ran.stdout == "['hydra_plugins.attn_exp']\n"
