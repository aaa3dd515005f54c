"""attn_exp: which attention implementation is fastest here, by how much, and can the number be trusted?"""

import sys

try:
    # First the packages `attn_exp.compare` and `attn_exp.run`: a later first import of one of their modules would
    # rebind the names `compare` and `run`.
    import attn_exp.compare
    import attn_exp.run  # noqa: F401
    from attn_exp.api import UndecidedWarning, assert_correct, assert_not_slower, compare, load, run, time
    from attn_exp.core.versions import __version__
except KeyboardInterrupt:
    # As in __main__.py, which is imported after this: Python calls a module `-m` until it has found it.
    if sys.argv[:1] != ["-m"] or sys.orig_argv[1:3] != ["-m", "attn_exp"]:
        raise
    sys.exit(130)

__all__ = ["UndecidedWarning", "__version__", "assert_correct", "assert_not_slower", "compare", "load", "run", "time"]


def __dir__() -> list[str]:
    return sorted(__all__)
