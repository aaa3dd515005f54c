"""Moments: readings of the host's clock that never goes back, as seconds since 1970."""

import time
from functools import cache


def moment(reading_s: float) -> float:
    """Return when `time.perf_counter()` showed this, in seconds since 1970 and to the microsecond.

    On Linux it is one clock for all processes. It is compared with the time of day once for each process: differences
    of moments are exact even if that is set meanwhile.
    """
    return round(_offset_s() + reading_s, 6)


@cache
def _offset_s() -> float:
    return time.time() - time.perf_counter()
