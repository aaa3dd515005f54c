"""The Python API: run, load and compare sweeps. Imports nothing heavy before a function is called."""

from attn_exp.api.read import compare, load
from attn_exp.api.run import run

__all__ = ["compare", "load", "run"]
