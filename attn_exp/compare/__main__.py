"""python -m attn_exp.compare: an earlier spelling of `attn-exp compare`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[:1] = ["python -m attn_exp.compare", "compare"]
    runpy.run_module("attn_exp", run_name="__main__")
