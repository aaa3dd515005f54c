"""python -m attn_exp.ui: an earlier spelling of `attn-exp ui`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[:1] = ["python -m attn_exp.ui", "ui"]
    runpy.run_module("attn_exp", run_name="__main__")
