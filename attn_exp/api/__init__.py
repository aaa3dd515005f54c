"""The Python API: run, load and compare sweeps, time functions of one's own. Imports nothing heavy before a call."""

from attn_exp.api.read import compare, load
from attn_exp.api.run import run
from attn_exp.api.time import time

__all__ = ["compare", "load", "run", "time"]
