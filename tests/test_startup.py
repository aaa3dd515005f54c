"""What the start of a worker imports; test_cli.py has that of a command."""

import subprocess
import sys

IMPORTED = """
import sys
import attn_exp.worker.measure
unused = {"triton", "torch.utils.flop_counter", "matplotlib", "mlflow", "hydra"}
print(sorted(name for name in unused & set(sys.modules)))
"""


def test_a_worker_imports_nothing_that_it_may_not_need():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
