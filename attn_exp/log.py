"""python -m attn_exp.log: an earlier spelling of `attn-exp log`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[:1] = ["python -m attn_exp.log", "log"]
    runpy.run_module("attn_exp", run_name="__main__")
