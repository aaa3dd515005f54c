"""A call with what happens around it, untimed: before it new inputs, after it a look at what it returned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]


def _nothing() -> None:
    """Do nothing."""


def _nothing_with(result: Any) -> None:
    """Do nothing with a result."""


@dataclass(frozen=True)
class TimedCall:
    """What a timer times. For each timed call it does `before()`, the cache flush, `run()`, `after(result)`.

    Only `run` lies between the two readings of the clock. On a GPU all of them are enqueued on the current stream.

    Attributes:
        run: the call.
        before: changes the inputs, so that no result of an earlier call is right.
        after: is given the result. It must not keep it: an output that stays alive changes where the next one lies.
    """

    run: Call
    before: Callable[[], None] = _nothing
    after: Callable[[Any], None] = _nothing_with

    def __call__(self) -> Any:
        """Run the call without what is around it."""
        return self.run()


def as_timed(call: Call) -> TimedCall:
    """Return the call as a timed one; a plain call has nothing around it."""
    return call if isinstance(call, TimedCall) else TimedCall(call)
