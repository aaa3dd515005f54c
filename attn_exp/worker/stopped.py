"""How a job ends early."""

from attn_exp.core.status import Status


class Stopped(Exception):
    """Ends the job with a status other than `ok`."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


class Untrusted(Stopped):
    """Ends the job because this process no longer has the clocks and functions that judge it."""
