"""python -m attn_exp.explain: an earlier spelling of `attn-exp explain`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[:1] = ["python -m attn_exp.explain", "explain"]
    runpy.run_module("attn_exp", run_name="__main__")
