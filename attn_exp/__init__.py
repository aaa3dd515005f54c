"""attn_exp: which attention implementation is fastest here, by how much, and can the number be trusted?"""

from attn_exp.api import UndecidedWarning, assert_correct, assert_not_slower, compare, load, run, time
from attn_exp.core.versions import __version__

__all__ = ["UndecidedWarning", "__version__", "assert_correct", "assert_not_slower", "compare", "load", "run", "time"]


def __dir__() -> list[str]:
    return sorted(__all__)
