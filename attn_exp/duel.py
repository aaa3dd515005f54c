"""python -m attn_exp.duel: an earlier spelling of `attn-exp duel`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[:1] = ["python -m attn_exp.duel", "duel"]
    runpy.run_module("attn_exp", run_name="__main__")
