"""Check the time of a pass against what the machine, and the call's own kernels, allow."""

from attn_exp.core.flags import telemetry_flags
from attn_exp.core.hardware import Peak
from attn_exp.core.limits import PRODUCT_FACTOR, above_datasheet, above_product, below_kernels, flops_per_s
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.machine.ceilings import fastest_product
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.stopped import Stopped


def check_limits(attempt: Attempt, machine: Machine, direction: str, peak: Peak | None) -> None:
    """Check the stored timings of a pass.

    A time that is too short for the matrix product that the worker measured at its start is compared with the product
    once more, as fast as the machine can compute one now: that first rate is too low where the machine was busy, and
    where the case's dtype has no units of its own.

    Raises:
        Stopped: the time is shorter than any right result's.
    """
    case, measured = attempt.request.case, attempt.passes[direction]
    ranking = measured.timings[0]
    reason = above_datasheet(case, direction, ranking, peak, measured.work)
    if reason is None:
        product = attempt.ceilings.get("matmul_flops_per_s")
        if above_product(case, direction, ranking, product, measured.work):
            enough = flops_per_s(case, direction, ranking, measured.work) / PRODUCT_FACTOR
            fastest = fastest_product(machine.device, case.dtype, enough)
            reason = above_product(case, direction, ranking, max(fastest, product or 0.0), measured.work)
    if reason is None and below_kernels(direction, measured.timings, attempt.flags):
        readings = [*attempt.telemetry, *machine.reading()]
        flags = attempt.flags | telemetry_flags(readings, machine.environment.get("max_sm_clock_mhz"))
        reason = below_kernels(direction, measured.timings, flags)
    if reason:
        raise Stopped("implausible", reason)
