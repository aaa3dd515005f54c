"""The commands as they are typed: their list and help, earlier spellings, and what the TAB key offers."""

import contextlib
import importlib
import subprocess
import sys

import cli
import pytest
from inprocess import typed

from attn_exp.cli import COMMANDS, dispatch
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.core.versions import __version__

OWN = [name for name in COMMANDS if name != "run"]


@pytest.fixture
def call(monkeypatch, tmp_path):
    return typed(monkeypatch, tmp_path)


@pytest.mark.parametrize("words", [["--help"], ["-h"]])
def test_the_list_has_every_command_and_says_where_help_is(words, call):
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    width = max(map(len, COMMANDS))
    for name, what in COMMANDS.items():
        assert f"\n  {name:<{width}}  {what}\n" in out
    for said in (
        "-m backend=flash,cudnn batch=1,8,16",
        "attn-exp COMMAND --help",
        "attn-exp run --help",
        "--hydra-help",
    ):
        assert said in out
    assert max(map(len, out.splitlines())) <= 110
    folder = conf_folder().parent / "attn_exp" / "commands"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "options"}
    assert modules == set(COMMANDS) or not folder.exists()


@pytest.mark.parametrize("name", OWN)
def test_a_commands_help_is_complete_and_narrow(name, call):
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: attn-exp {name}")
    for heading in ("\nexamples:\n", "\noptions:\n", "\nexit codes:\n"):
        assert heading in out
    assert max(map(len, out.splitlines())) <= 100
    assert f"attn-exp {name}" in out.partition("examples:")[2]


@pytest.mark.parametrize("name", OWN)
def test_every_option_has_a_reader_and_a_default_of_its_type(name):
    command = importlib.import_module(f"attn_exp.commands.{name}").COMMAND
    place = [] if command.place is None else ["first"]
    options = command.parse(place)
    for one in command.named.values():
        default = getattr(options, one.field)
        assert one.kind is not bool or default is False
        with contextlib.suppress(UserError):
            read = one.parse("1")
            assert default is None or type(read) is type(default) or one.name == "rows"


def test_help_imports_nothing_that_takes_long(tmp_path):
    heavy = ("torch", "hydra", "omegaconf", "mlflow", "yaml", "tabulate", "jinja2", "matplotlib", "numpy")
    code = (
        "import sys\nfrom attn_exp.cli import COMMANDS, dispatch\n"
        "for name in COMMANDS:\n    assert name == 'run' or dispatch([name, '--help']) == 0\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=cli.environment(), capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_version_is_printed_for_any_way_of_asking(call):
    for words in (["--version"], ["run", "--version"]):
        assert call(*words) == (0, f"attn_exp {__version__}\n", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "comapre first",
            "attn-exp: there is no command 'comapre': did you mean 'compare'? attn-exp --help lists them",
        ),
        ("ui first port=x", "attn-exp ui: port=x is no port: use a number from 1 to 65535, for example port=5001"),
        ("ui first second", "attn-exp ui: ui takes one SWEEP, and 2 were given: attn-exp ui first"),
        ("doctor cpu", "attn-exp doctor: doctor takes no name, and 'cpu' was given: the options are device="),
        ("doctor devise=cpu", "attn-exp doctor: there is no option 'devise=': did you mean 'device'?"),
        (
            "worker",
            "attn-exp worker: no JOB_FOLDER was given: write one, for example attn-exp worker multirun/SWEEP/JOB",
        ),
        (
            "duel a=flash flash",
            "attn-exp duel: 'flash' is not of the form key=value: attn-exp duel a=flash b=cudnn batch=8 seq_len=4096",
        ),
        (
            "log first batch=1",
            "attn-exp log: there is no option 'batch=': "
            "the options are uri=, mlflow_experiment=, folder=, --config-dir, tracker=",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exits_with_2(line, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert dispatch(line.split()) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{said}\n")


def test_an_interrupt_of_any_command_exits_with_130(tmp_path):
    # In the middle of a comparison, when its reader would run. A suite that was started with nohup ignores signals.
    code = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGQUIT, signal.SIG_DFL)\n"
        "import attn_exp.cli as cli\nfrom importlib import import_module\n"
        "def run(choice, words):\n    os.kill(os.getpid(), getattr(signal, name))\n    signal.pause()\n"
        "name, import_module('attn_exp.comparison.answer').read_sweeps = sys.argv.pop(), run\ncli.main()\n"
    )
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGXCPU"):
        command = [sys.executable, "-c", code, "compare", "first", name]
        done = subprocess.run(command, cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, cli.without_progress(done.stderr)) == (130, "", [])
