"""Compare steps whose gradient is new after the forward with steps whose gradient is there before it, as it is timed.

In training the gradient of an output depends on what is made of it, so no forward knows it. In a benchmark it lies in
memory before the step begins: a forward could compute the gradients at once, with fewer products and nothing saved, and
the backward hand them over, or compute them if another gradient comes. No result shows that. On a CPU operators are
counted, which a busy machine does not change; where there are none, and on a GPU, steps are timed.
"""

from collections import Counter
from random import SystemRandom
from statistics import median

from attn_exp.core.text import figures
from attn_exp.timers.timed_call import TimedCall
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.one_call import OneCall
from attn_exp.worker.judge.pairs import MOST, is_longer, nearly_all_longer
from attn_exp.worker.judge.products import always_more, products
from attn_exp.worker.stopped import Stopped

# Steps of each kind that are timed at least.
_ENOUGH = 2


def check_steps(attempt: Attempt, judge: Judge, clock: OneCall) -> None:
    """Compare steps with a new gradient after the forward with others.

    Args:
        attempt: the job.
        judge: makes steps, and changes their inputs.
        clock: of single calls.

    Raises:
        Stopped: they take more.
    """
    with attempt.stage("accuracy"):
        wrong = None if clock.on_gpu else _more_products(judge)
        # A step may see that it is counted.
        wrong = wrong or _longer(judge, clock)
    if wrong:
        raise Stopped("implausible", f"step: {wrong}: its forward computed what a backward has to")


def _step(judge: Judge, *, known: bool) -> TimedCall:
    """Return a step that changes its gradient first, or between its halves."""

    def run() -> None:
        if known:
            judge.fresh.renew_gradient()
        out = judge.forward()
        if not known:
            judge.fresh.renew_gradient()
        judge.backward_of(out)()

    return TimedCall(run, judge.fresh.renew)


def _more_products(judge: Judge) -> str | None:
    """Return what steps with a new gradient do more, or None."""

    def pair() -> tuple[Counter[str], Counter[str]]:
        return products(_step(judge, known=False)), products(_step(judge, known=True))

    more = always_more(pair)
    return more and f"with a gradient that is new after the forward it runs {more}"


def _longer(judge: Judge, clock: OneCall) -> str | None:
    """Return by how much steps with a new gradient take longer, if nearly all do, or None."""
    device, times_us = "cuda" if clock.on_gpu else "cpu", {True: list[float](), False: list[float]()}
    for count in range(MOST):
        if count >= _ENOUGH and not is_longer(min(times_us[False]), min(times_us[True]), device):
            return None
        for known in SystemRandom().sample((True, False), 2):
            step = _step(judge, known=known)
            times_us[known].append(clock.time_us(step.run, step.before))
    if not nearly_all_longer(times_us[False], times_us[True], device):
        return None
    new_us, timed_us = (figures(median(times_us[known])) for known in (False, True))
    return f"with a gradient that is new after the forward it takes {new_us} us, {timed_us} us with one that was there"
