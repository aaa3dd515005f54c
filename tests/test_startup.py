"""What a start imports."""

import subprocess
import sys

import cli

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
