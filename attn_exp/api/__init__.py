"""The Python API: run, load and compare sweeps, time and guard functions of one's own.

Nothing heavy is imported before a call.
"""

from attn_exp.api.guard import UndecidedWarning, assert_correct, assert_not_slower
from attn_exp.api.read import compare, load
from attn_exp.api.run import run
from attn_exp.api.time import time

__all__ = ["UndecidedWarning", "assert_correct", "assert_not_slower", "compare", "load", "run", "time"]
