"""python examples/first_sweep.py [KEY=VALUE ...]: start a sweep from Python and print the fastest backend of each case.

The sweep runs as a command of its own, so that a crashing kernel cannot end this program; run it again to resume. The
rest only reads records, and needs neither torch nor a GPU.
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
    where = f"{row.cell.direction} {row.cell.result.case.label()}: {row.cell.result.label}"
    if row.best:  # the fastest, or too close to it to call
        print(where)
    elif row.doubt:  # on a busy machine, for example
        print(f"{where} decides nothing ({row.doubt})")
