"""python -m attn_exp.doctor: an earlier spelling of `attn-exp doctor`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[:1] = ["python -m attn_exp.doctor", "doctor"]
    runpy.run_module("attn_exp", run_name="__main__")
