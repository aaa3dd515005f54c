"""A backend that does next to nothing, for bench/bookkeeping.py: what is left of a job is its bookkeeping."""

from attn_exp.backends.eager import Eager


class Idle(Eager):
    """The plain formula, right, without a claim; the case is what makes it nothing."""

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        return None
