"""Limits: what no right result can be faster than, and the sentence that says so."""

import statistics
from collections.abc import Collection, Sequence

from attn_exp.core.case.case import Case
from attn_exp.core.host.hardware import Peak
from attn_exp.core.record.metrics import ISSUE_ONLY, attention_work
from attn_exp.core.record.record import Timing, Work
from attn_exp.core.stats.summary import summarize

# Above the datasheet's rate by more than rounding of the datasheet itself.
IMPLAUSIBLE_FACTOR = 1.02
# The fastest of 406 passes on an H200 (results/h200 at b6fbbac9) ran at 1.10 times the rate of the matrix product
# measured beside it: attention draws less power and is capped less.
PRODUCT_FACTOR = 1.5
# The name of the `kernel` timer's note: the time in microseconds in which a call's kernels ran, on whichever stream.
UNION_NOTE = "union_us"
# Timers that see what the call's stream waits for.
_STREAM_TIMERS = ("device", "event", "graph")
# Timers that wait for the whole device after calls with warm caches, where kernels may take less than in the trace.
_WARM_TIMERS = ("benchmark",)
# Of the 406 passes, 90 calm ones took at least 0.990 times what the `kernel` timer had as the union of their kernels.
# Under a power cap, or drifting, 316 took at least 0.865 times as much: the clock is another one from call to call.
_CALM_FACTOR, _RESTLESS_FACTOR, _UNION_SLACK_US = 0.9, 0.75, 3.0
# A read of 16 MB took 0.42 times as long with hot caches as with cold ones (results/h200/doctor/doctor.txt).
_WARM_FACTOR = 0.3
_RESTLESS = frozenset({"drift", "unstable", "power_capped", "thermal"})


def above_datasheet(
    case: Case, direction: str, timing: Timing, peak: Peak | None, work: Work | None = None
) -> str | None:
    """Return the sentence that says which of the datasheet's rates the median exceeds, or None."""
    if peak is None or timing.timer in ISSUE_ONLY:
        return None
    seconds = summarize(timing.times_us, timing.rounds).median_us / 1e6
    work = work or attention_work(case, direction, saves_lse=False)
    rate, limit = work.flops / seconds, peak.flops_limit(case.dtype)
    if limit is not None and rate > limit * IMPLAUSIBLE_FACTOR:
        return f"{direction}: {rate / 1e12:,.0f} TFLOP/s is above the {peak.name}'s peak of {limit / 1e12:,.0f}"
    speed = work.bytes / seconds
    if timing.l2 != "warm" and speed > peak.bytes_per_s * IMPLAUSIBLE_FACTOR:
        return f"{direction}: {speed / 1e12:.1f} TB/s is above the {peak.name}'s peak of {peak.bytes_per_s / 1e12:.1f}"
    return None


def flops_per_s(case: Case, direction: str, timing: Timing, work: Work | None = None) -> float:
    """Return the FLOP/s at the median, of the unmasked pairs or of a block's work."""
    seconds = summarize(timing.times_us, timing.rounds).median_us / 1e6
    return (work or attention_work(case, direction, saves_lse=False)).flops / seconds


def above_product(
    case: Case, direction: str, timing: Timing, product_flops_per_s: float | None, work: Work | None = None
) -> str | None:
    """Return the sentence that says how far the median exceeds a measured matrix product's rate, or None."""
    if not product_flops_per_s or timing.timer in ISSUE_ONLY:
        return None
    rate = flops_per_s(case, direction, timing, work)
    if rate <= PRODUCT_FACTOR * product_flops_per_s:
        return None
    return (
        f"{direction}: {rate / 1e12:.3g} TFLOP/s is above {PRODUCT_FACTOR} times this machine's matrix product, "
        f"measured at {product_flops_per_s / 1e12:.3g} TFLOP/s"
    )


def below_kernels(direction: str, timings: Sequence[Timing], flags: Collection[str]) -> str | None:
    """Return the sentence that says how far the ranking timer's median is below the union of the kernels, or None.

    Args:
        direction: the pass.
        timings: the ranking timer's samples, and those that the `kernel` timer took at the same clocks.
        flags: the flags of the samples and the machine; the margin is wider if clocks changed. With `shared_gpu` none
            is compared, since the time slices stretch the kernels of a trace: 107 us became 2,557.
    """
    union_us = next((one.notes[UNION_NOTE] for one in timings[1:] if UNION_NOTE in one.notes), None)
    warm = timings[0].timer in _WARM_TIMERS
    if union_us is None or "shared_gpu" in flags or not (warm or timings[0].timer in _STREAM_TIMERS):
        return None
    median_us = statistics.median(timings[0].times_us)
    factor = _WARM_FACTOR if warm else _RESTLESS_FACTOR if _RESTLESS & set(flags) else _CALM_FACTOR
    if median_us >= factor * union_us - _UNION_SLACK_US:
        return None
    why = "the stream that makes the call does not wait for all of its work"
    if warm:
        why = "calls on the same inputs do not compute them again"
    return (
        f"{direction}: {timings[0].timer} has {median_us:,.1f} us where the call's kernels run for {union_us:,.1f} us: "
        f"{why}"
    )
