"""python -m attn_exp.backends: an earlier spelling of `attn-exp backends`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[:1] = ["python -m attn_exp.backends", "backends"]
    runpy.run_module("attn_exp", run_name="__main__")
