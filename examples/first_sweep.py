"""python examples/first_sweep.py [KEY=VALUE ...]: a sweep started from Python, then the fastest backend of each case.

The sweep is the same command as in a shell, so a crash of a kernel cannot take this program along; it goes on where it
was if it is started again. Everything after it reads records, and needs neither torch nor a GPU.
"""

import subprocess
import sys

from attn_exp import compare, load

CHOICES = ["backend=flash,math", "batch=1,2", "seq_len=64", "sweep=from_python", *sys.argv[1:]]
subprocess.run([sys.executable, "-m", "attn_exp", "-m", *CHOICES], check=True)

sweep = load("from_python")
for result in sweep.results:
    if result.status != "ok":
        print(f"{result.label} {result.case.label()}: {result.status}: {result.reason}")

for row in compare(sweep).rows:
    if row.best:  # or not to be told from the best
        print(f"{row.cell.direction} {row.cell.result.case.label()}: {row.cell.result.label}")
