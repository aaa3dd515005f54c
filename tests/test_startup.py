"""What a start costs: bench/startup.py times what runs, a terminal hears at once, a worker imports what it needs."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cli
import pytest

from attn_exp.commands.run import main
from attn_exp.core.ticker import Ticker

ROOT = Path(__file__).resolve().parent.parent


def test_a_command_is_timed_and_one_that_is_not_there_is_named(tmp_path):
    # A checkout without the package: its command ends by exit code 1.
    out, empty = tmp_path / "out.json", tmp_path / "empty"
    (empty / "attn_exp").mkdir(parents=True)
    (empty / "attn_exp" / "__init__.py").touch()
    command = [sys.executable, str(ROOT / "bench" / "startup.py"), str(ROOT), str(empty)]
    done = subprocess.run(
        [*command, "--runs", "2", "--only=--version", "--out", str(out)], capture_output=True, text=True, check=True
    )
    here, nowhere = json.loads(out.read_text())["commands"]
    assert here["command"] == "python -m attn_exp --version"
    assert here["exit_code"] == 0 and here["modules"] > 50
    assert len(here["wall_s"]) == len(here["cpu_s"]) == 2 and min(here["wall_s"] + here["cpu_s"]) > 0
    assert (nowhere["exit_code"], nowhere["wall_s"]) == (1, [])
    assert "exit code 1" in done.stdout


@pytest.mark.parametrize(
    ("meets", "program", "code", "quiet"),
    [
        ("attn_exp.api", ["-m", "attn_exp", "--version"], 130, True),
        ("attn_exp.cli", ["-m", "attn_exp", "--version"], 130, True),
        ("attn_exp.api", ["-c", "import attn_exp"], -signal.SIGINT, False),
    ],
    ids=["package", "command_line", "library"],
)
def test_ctrl_c_within_the_first_imports_says_nothing_but_to_who_imports_the_library(
    meets, program, code, quiet, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {meets!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\n"
    )
    variables = cli.environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    ended = subprocess.run([sys.executable, *program], env=variables, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, not ended.stderr) == (code, "", quiet)


def test_an_interrupt_that_a_library_answers_with_an_error_of_its_own_is_one():
    code = """
import signal
import attn_exp.cli as cli
signal.signal(signal.SIGINT, signal.default_int_handler)
def dispatch(arguments, earlier):
    try:
        if arguments[0] != "none":
            signal.raise_signal(getattr(signal, arguments[0]))
    finally:
        raise AttributeError("half made")
cli.dispatch = dispatch
cli.main()
"""
    for name, said in (("SIGINT", ""), ("SIGTERM", ""), ("none", "AttributeError: half made")):
        ended = subprocess.run(
            [sys.executable, "-c", code, name], env=cli.environment(), capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout) == (130 if not said else 1, ""), ended.stderr
        assert ended.stderr.strip().endswith(said) and bool(ended.stderr) == bool(said)


def test_what_the_tests_start_is_not_deaf_to_interrupts():
    """Also where the tests themselves are, in the background of a script or below nohup."""
    said = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    assert not int(said.split()[1], 16) & (1 << signal.SIGINT - 1 | 1 << signal.SIGHUP - 1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_hears_at_once_that_something_starts_and_a_file_does_not():
    terminal, file = Terminal(), io.StringIO()
    with Ticker(terminal, at_once=True) as one, Ticker(file, at_once=True) as other:
        for ticker in (one, other):
            ticker.stage("composing the jobs")
        until = time.monotonic() + 20
        while not terminal.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        assert terminal.getvalue().startswith("\r\x1b[Kcomposing the jobs, 0 s")
    assert file.getvalue() == ""


def test_the_first_line_on_a_terminal_comes_before_anything_is_composed(monkeypatch):
    said = []
    monkeypatch.setattr("attn_exp.commands.run.start_ahead", lambda worker: said.append("worker"))
    monkeypatch.setattr(Ticker, "stage", lambda self, text, *_, **__: said.append(text))
    monkeypatch.setattr("attn_exp.commands.run._measure", lambda arguments, session: said.append("composed") or 0)
    assert main(["device=cpu"]) == 0
    assert said[:3] == ["worker", "composing the jobs", "composed"]


IMPORTED = """
import sys
import time
import attn_exp.worker.measure
unused = {"triton", "torch.utils.flop_counter", "matplotlib", "mlflow", "hydra"}
print(sorted(name for name in unused & set(sys.modules)))
"""


def test_a_worker_imports_nothing_that_it_may_not_need():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


DRAWS = """
import sys
import time
from attn_exp.plots.all import import_drawing
import_drawing()
before = set(sys.modules)
from attn_exp.plots.style import new_figure
new_figure(2.0, 2.0).savefig("a.svg")
print(sorted(name for name in set(sys.modules) - before if name.startswith(("matplotlib", "numpy"))))
"""


def test_what_draws_plots_can_be_imported_while_jobs_are_measured(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DRAWS], capture_output=True, text=True, cwd=tmp_path, env=cli.environment()
    )
    assert done.returncode == 0, done.stderr
    # Nothing large is left for the sweep's end.
    assert len(json.loads(done.stdout.replace("'", '"'))) <= 12, done.stdout
