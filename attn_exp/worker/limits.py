"""Check the time of a pass against what the machine, and the call's own kernels, allow."""

from attn_exp.core.host.hardware import Peak
from attn_exp.core.record.flags import telemetry_flags
from attn_exp.core.record.limits import PRODUCT_FACTOR, above_datasheet, above_product, below_kernels, flops_per_s
from attn_exp.worker.attempt import Attempt, Stopped
from attn_exp.worker.machine.ceilings import fastest_product
from attn_exp.worker.machine.device import Machine


def check_limits(attempt: Attempt, machine: Machine, direction: str, peak: Peak | None) -> None:
    """Check the stored timings of a pass.

    A time that is too short for the matrix product at the worker's start is compared with the fastest that the machine
    computes now, since a dtype may have no units of its own. On a CPU that other programs use no product shows what it
    can reach: the record has the flag `busy_host`. Raises Stopped if the time is shorter than any right result's.
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
            if reason and machine.gpu is None and "busy_host" in _flags(attempt, machine):
                attempt.flags.add("busy_host")
                reason = None
    if reason is None and below_kernels(direction, measured.timings, attempt.flags):
        reason = below_kernels(direction, measured.timings, attempt.flags | _flags(attempt, machine))
    if reason:
        raise Stopped("implausible", reason)


def _flags(attempt: Attempt, machine: Machine) -> set[str]:
    """Return the flags of what the device's counters say until now."""
    return telemetry_flags([*attempt.telemetry, *machine.reading()], machine.environment.get("max_sm_clock_mhz"))
