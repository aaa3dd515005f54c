"""The commands as they are typed: their list and help, earlier spellings, and what the TAB key offers."""

import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace

import cli
import pytest
import sweeps
from inprocess import typed

from attn_exp.cli import COMMANDS, dispatch
from attn_exp.commands.complete import answer
from attn_exp.commands.options import DEFAULT_STORE
from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.overrides import with_todays_keys
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.core.version import __version__
from attn_exp.tracking.location import DEFAULT_URI

OWN = [name for name in COMMANDS if name != "run"]
ID = "0123456789abcdef0123456789abcdef"


def command_of(name):
    module = __import__(f"attn_exp.commands.{name}", fromlist=["COMMAND"])
    return module.COMMAND


@pytest.fixture
def call(monkeypatch, tmp_path):
    return typed(monkeypatch, tmp_path)


# How README.md and docs/ wrote these commands before there was `attn-exp COMMAND`, and what to write now.
EARLIER = {
    "backends --config-dir CONF model=gemma2": "attn-exp backends model=gemma2 --config-dir CONF",
    "backends model=llama3_8b seq_len=4096 window=1024": "attn-exp backends model=llama3_8b seq_len=4096 window=1024",
    "compare sweep=nightly-* history": "attn-exp compare 'nightly-*' history=true",
    "compare sweep=first baseline=flash by=dtype,causal": "attn-exp compare first baseline=flash by=dtype,causal",
    "compare sweep=first out=report.html plots=pictures": "attn-exp compare first out=report.html plots=pictures",
    "compare sweep=first published=figures.csv": "attn-exp compare first published=figures.csv",
    "compare sweep=first uri=sqlite:///mlruns/mlflow.db": "attn-exp compare first uri=sqlite:///mlruns/mlflow.db",
    "compare sweep=first sort=-tflops where=causal": "attn-exp compare first sort=-tflops where=causal",
    "compare sweep=first,second metric=peak_memory_bytes": "attn-exp compare first,second metric=peak_memory_bytes",
    "compare sweep=new against=old --fail-if-slower 3%": "attn-exp compare new against=old fail_if_slower=3%",
    "compare sweep=new against=old --fail-if-slower=3%": "attn-exp compare new against=old fail_if_slower=3%",
    "compare sweep=a uri=x experiment=e": "attn-exp compare a uri=x mlflow_experiment=e",
    "compare multirun/a sweep=b": "attn-exp compare multirun/a b",
    "doctor device=cpu": "attn-exp doctor device=cpu",
    "duel --config-dir CONF a=sliced b=flash a.rows=128 seq_len=256":
        "attn-exp duel a=sliced b=flash a.rows=128 seq_len=256 --config-dir CONF",
    "duel a=flash b=math batch=8 ++x=1 ~y": "attn-exp duel a=flash b=math batch=8 ++x=1 '~y'",
    "explain first/flash plots=pictures": "attn-exp explain first/flash plots=pictures",
    f"explain {ID} uri=http://me:secret@host": f"attn-exp explain {ID} uri=http://host",
    "log nightly-* tracker.uri=http://tracking.example:5000": "attn-exp log 'nightly-*' "
        "tracker.uri=http://tracking.example:5000",
    "log first second tracker=server tracker.experiment=mine": "attn-exp log first second tracker=server "
        "tracker.mlflow_experiment=mine",
    "ui": "attn-exp ui",
    "ui --open-sweep first": "attn-exp ui first",
    "ui --open-sweep=first --port 5001 --host=0.0.0.0": "attn-exp ui first port=5001 host=0.0.0.0",
    "ui --uri sqlite:///a.db --experiment mine": "attn-exp ui uri=sqlite:///a.db mlflow_experiment=mine",
}  # fmt: skip


@pytest.mark.parametrize("line", EARLIER)
def test_an_earlier_spelling_works_and_its_hint_is_todays(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CONF").mkdir()
    name, *words = line.split()
    command = command_of(name)
    seen = []
    stub = replace(command, run=lambda given: seen.append(given) or 0)
    assert stub.main(words, earlier=True) == 0
    err = capsys.readouterr().err
    assert err == f"hint: `{EARLIER[line]}` is the command's new spelling\n"
    # What the hint says asks for the same, without a hint.
    if "secret" not in line:
        assert stub.main(shlex.split(EARLIER[line])[2:]) == 0
        assert capsys.readouterr().err == ""
        first, second = seen
        assert (first.words, first.values, first.overrides) == (second.words, second.values, second.overrides)


@pytest.mark.parametrize(
    ("line", "hinted"),
    [
        ("compare sweep=a", True),
        ("compare a history", True),
        ("compare a --history", False),
        ("compare a --history true", False),
        ("compare a --margin 3%", False),
        ("ui --open-sweep a", True),
        ("worker --once a", False),
    ],
)
def test_a_command_is_hinted_at_only_where_it_changed(line, hinted):
    name, *words = line.split()
    assert command_of(name).parse(words).earlier is hinted


def test_the_earlier_modules_run_their_commands(tmp_path):
    for name in ("old", "new"):
        sweeps.write(tmp_path / "multirun" / name, [sweeps.job("flash", 100.0 + len(name)), sweeps.job("math", 90.0)])
    words = ("sweep=new", "against=old", "--fail-if-slower", "3%")
    earlier = cli.run(*words, cwd=tmp_path, module="attn_exp.compare")
    today = cli.run("compare", "new", "against=old", "fail_if_slower=3%", cwd=tmp_path)
    assert (earlier.returncode, earlier.stdout) == (today.returncode, today.stdout) == (0, today.stdout)
    hint = "hint: `attn-exp compare new against=old fail_if_slower=3%` is the command's new spelling\n"
    assert (earlier.stderr, today.stderr) == (hint, "")
    for name in ("duel", "explain", "doctor", "backends", "log", "ui"):
        shown = cli.run("--help", cwd=tmp_path, module=f"attn_exp.{name}")
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"{command_of(name).help()}\n", "")


@pytest.mark.parametrize(
    ("earlier", "today"),
    [("plots=false", "save_plots=false"), ("tracker.experiment=mine", "tracker.mlflow_experiment=mine")],
)
def test_an_earlier_key_of_a_run_works_with_a_hint(call, earlier, today):
    code, out, err = call("device=cpu", "backend=math", "dry_run=true", earlier)
    assert (code, err) == (0, f"hint: `{today}` is the new spelling of `{earlier}`\n")
    assert call("device=cpu", "backend=math", "dry_run=true", today) == (0, out, "")


def test_a_file_of_ones_own_may_have_earlier_keys():
    config = {"plots": False, "save_plots": True, "tracker": {"name": "mlflow", "experiment": "mine"}, "batch": 1}
    changed, hints = with_todays_keys(config)
    assert changed == {"save_plots": False, "tracker": {"name": "mlflow", "mlflow_experiment": "mine"}, "batch": 1}
    assert config["plots"] is False
    assert hints == [
        "hint: the key `save_plots` is the new spelling of `plots`, which a file of yours sets",
        "hint: the key `tracker.mlflow_experiment` is the new spelling of `tracker.experiment`, which a file of yours "
        "sets",
    ]
    assert with_todays_keys({"batch": 1}) == ({"batch": 1}, [])


def test_the_command_line_wins_over_an_earlier_key_of_a_file(tmp_path):
    path = tmp_path / "conf" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nplots: maybe\n")
    words = ("--config-dir", str(tmp_path / "conf"), "+experiment=mine", "device=cpu", "backend=math", "timer=cpu")
    stopped = cli.run("run", *words, "tracker=none", "isolation=none", cwd=tmp_path)
    assert stopped.returncode == 2
    assert "save_plots=maybe is neither true nor false" in stopped.stderr
    listed = cli.run("run", *words, "save_plots=true", "dry_run=true", cwd=tmp_path)
    assert (listed.returncode, listed.stderr.count("hint: the key `save_plots`")) == (0, 1)
    config = compose_config(["+experiment=mine", "save_plots=true"], "a", tmp_path / "conf")
    assert resolved_config(config, ["save_plots=true"])["save_plots"] is True
    assert resolved_config(config)["save_plots"] == "maybe"


def test_whether_plots_are_saved_is_no_part_of_a_job(call):
    lines = {
        call("device=cpu", "backend=math", "dry_run=true", f"save_plots={value}")[1] for value in ("true", "false")
    }
    assert len(lines) == 1


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
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "options", "complete"}
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


def test_the_default_store_is_the_trackers():
    assert DEFAULT_STORE == DEFAULT_URI


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
        (
            "explan first",
            "attn-exp: there is no command 'explan': did you mean 'explain'? attn-exp --help lists them",
        ),
        ("ui first port=x", "attn-exp ui: port=x is no port: use a number from 1 to 65535, for example port=5001"),
        ("ui first second", "attn-exp ui: ui takes one SWEEP, and 2 were given: attn-exp ui first"),
        ("doctor cpu", "attn-exp doctor: doctor takes no name, and 'cpu' was given: the options are device="),
        (
            "doctor devise=cpu",
            "attn-exp doctor: there is no option 'devise=': did you mean 'device'?",
        ),
        (
            "worker",
            "attn-exp worker: no JOB_FOLDER was given: write one, for example attn-exp worker multirun/SWEEP/JOB",
        ),
        (
            "worker nowhere",
            "attn-exp worker: nowhere has no request.yaml: give a job's folder, as multirun/SWEEP/JOB",
        ),
        ("worker a once=yes", "attn-exp worker: once=yes is neither true nor false: write one of the two"),
        (
            "duel a=flash flash",
            "attn-exp duel: 'flash' is not of the form key=value: attn-exp duel a=flash b=cudnn batch=8 seq_len=4096",
        ),
        ("backends format=pdf", "attn-exp backends: format=pdf is not known: choose one of table, markdown"),
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
    # In the middle of a comparison, when its reader would run.
    code = (
        "import os, signal, sys\nimport attn_exp.cli as cli\nfrom importlib import import_module\n"
        "def run(choice, words):\n    os.kill(os.getpid(), getattr(signal, name))\n    signal.pause()\n"
        "name, import_module('attn_exp.compare.answer').read_sweeps = sys.argv.pop(), run\ncli.main()\n"
    )
    for name in ("SIGINT", "SIGTERM"):
        command = [sys.executable, "-c", code, "compare", "first", name]
        done = subprocess.run(command, cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, cli.without_progress(done.stderr)) == (130, "", [])


# The TAB key.


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for job in ("first/flash-1", "first/math-2", "friday/flash-3"):
        (tmp_path / "multirun" / job).mkdir(parents=True)
    (tmp_path / "figures.csv").touch()
    (tmp_path / "mine" / "backend").mkdir(parents=True)
    (tmp_path / "mine" / "backend" / "sliced.yaml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("attn-exp comp", {"compare", "compile=", "compile."}),
        ("attn-exp ex", {"explain"}),
        ("attn-exp -m backend=flash,cu", {"backend=flash,cudnn", "backend=flash,cudnn_graph"}),
        ("attn-exp -m backend=cudnn,cu", {"backend=cudnn,cudnn_graph"}),
        ("attn-exp +experiment=sd", {"+experiment=sdpa_sweep"}),
        ("attn-exp +ex", {"+experiment="}),
        ("attn-exp run model=llama3", {"model=llama3_8b", "model=llama3_70b"}),
        ("python -m attn_exp model=llama3", {"model=llama3_8b", "model=llama3_70b"}),
        ("attn-exp stopping.bud", {"stopping.budget_s="}),
        ("attn-exp model=flux model.se", {"model.seq_len="}),
        ("attn-exp hydra/launcher=l", {"hydra/launcher=local_gpus"}),
        ("attn-exp dry_run=", {"dry_run=true", "dry_run=false"}),
        ("attn-exp causal=t", {"causal=true"}),
        ("attn-exp --config-dir mine -m backend=sl", {"backend=sliced"}),
        ("attn-exp --hy", {"--hydra-help"}),
        ("attn-exp duel a=fl", {"a=flash", "a=flashinfer", "a=flex"}),
        ("attn-exp duel --co", {"--config-dir"}),
        ("attn-exp backends for", {"format="}),
        ("attn-exp backends format=m", {"format=markdown"}),
        ("attn-exp compare f", {"first", "friday", "fail_if_slower=", "format=", "folder="}),
        ("attn-exp compare first,f", {"first,friday"}),
        ("attn-exp compare first against=fr", {"against=friday"}),
        ("attn-exp compare first published=fi", {"published=figures.csv"}),
        ("attn-exp compare first hist", {"history="}),
        ("attn-exp explain first/fl", {"first/flash-1"}),
        ("attn-exp log fr", {"friday"}),
        ("attn-exp bisect goo", {"good="}),
        ("attn-exp bisect pass=b", {"pass=backward"}),
        ("attn-exp reproduce thunder", {"thunderkittens_h100"}),
        ("attn-exp reproduce thunderkittens_h100/", {"thunderkittens_h100/fa3-d128-b16h16-s12288-full-fwd"}),
        ("attn-exp reproduce lint form", {"format="}),
        ("attn-exp ui fr", {"friday"}),
        ("attn-exp doctor device=cu", {"device=cuda"}),
        ("attn-exp compare --he", {"--help"}),
        ("attn-exp nothing=x", set()),
    ],
)
def test_a_tab_offers_what_can_follow(places, line, offered):
    assert set(answer(line, COMMANDS)) == offered


def test_a_tab_is_answered_at_once(tmp_path):
    line = {"COMP_LINE": "attn-exp -m backend=flash,cu"}
    seconds = []
    for _ in range(3):
        crowded, began = cli.crowding(), time.perf_counter()
        command = [sys.executable, "-m", "attn_exp", "-sc", "query=bash"]
        done = subprocess.run(command, cwd=tmp_path, env=cli.environment() | line, capture_output=True, text=True,
                              check=True)  # fmt: skip
        seconds.append((time.perf_counter() - began) / crowded)
        assert done.stdout == "backend=flash,cudnn backend=flash,cudnn_graph\n"
    assert min(seconds) < 0.3, seconds


@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="needs bash")
def test_bash_completes_through_the_function_that_is_installed(places):
    folder = places / "bin"
    folder.mkdir()
    program = folder / "attn-exp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from attn_exp.cli import main; main()" "$@"\n')
    program.chmod(0o755)
    install = subprocess.run([sys.executable, "-c", "import sys; sys.argv[0] = 'attn-exp'; "
                              "from attn_exp.cli import main; main()", "-sc", "install=bash"],
                             cwd=places, env=cli.environment(), capture_output=True, text=True, check=True)  # fmt: skip
    pressed = "COMP_LINE='attn-exp compare first,f'; COMP_POINT=${#COMP_LINE}; COMP_CWORD=2; hydra_bash_completion; "
    script = f'{install.stdout}\n{pressed} echo "${{COMPREPLY[@]}}"'
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    command, environment = ["bash", "-c", script], cli.environment() | path
    done = subprocess.run(command, cwd=places, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "first,friday\n", done.stderr


def test_a_mistyped_override_of_a_command_is_refused_by_its_own_words():
    with pytest.raises(UserError, match="'plot=': did you mean 'plots'"):
        command_of("explain").parse(["first", "plot=x"])


def test_an_option_that_takes_sweeps_completes_those_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("multirun/here", "elsewhere/there"):
        (tmp_path / place).mkdir(parents=True)
    assert answer("attn-exp compare folder=elsewhere there against=", COMMANDS) == ["against=there"]
    assert answer("attn-exp compare here against=", COMMANDS) == ["against=here"]


def test_what_describes_a_backend_is_not_suggested_as_a_key(call):
    code, _, err = call("device=cpu", "backend=math", "dry_run=true", "backend.abuot.colours=red")
    assert code == 2
    assert "about.colour" not in err
