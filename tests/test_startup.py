"""What a start imports, and what an interrupt says within it."""

import os
import signal
import subprocess
import sys

import cli
import pytest


@pytest.mark.parametrize(
    ("meets", "program", "code", "quiet"),
    [
        ("attn_exp.api", ["-m", "attn_exp", "--version"], 130, True),
        ("attn_exp.api", ["-c", "import attn_exp"], -signal.SIGINT, False),
    ],
    ids=["command_line", "library"],
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


ANSWERS = """
import sys
from attn_exp.commands.run import main
assert main(["bacth=1", "isolation=none"]) == 2
unused = {"tabulate", "torch", "mlflow", "matplotlib", "rich", "attn_exp.sweep.dry_run"}
print(sorted(unused & set(sys.modules)))
"""


def test_a_key_that_does_not_exist_is_answered_before_what_it_may_not_need_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS], env=cli.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert "did you mean 'batch'?" in done.stderr
