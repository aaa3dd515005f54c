"""Sets the clock back for Python programs that have this folder in PYTHONPATH, as long as a file exists.

The variable ATTN_EXP_DRILL_CLOCK_BACK names it; a worker gets variables that begin so.

Only what Python asks for: `time.time`. The kernel's own clock, and so the times of files, go on.
"""

import os
import time

_SWITCH = os.environ.get("ATTN_EXP_DRILL_CLOCK_BACK")
_right = time.time


def _set_back() -> float:
    return _right() - (3600.0 if _SWITCH and os.path.exists(_SWITCH) else 0.0)


if _SWITCH:
    time.time = _set_back

if "ATTN_EXP_DRILL_NOBODY" in os.environ:
    import pwd

    def _nobody(user: object) -> object:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    pwd.getpwuid = _nobody  # type: ignore[assignment]
