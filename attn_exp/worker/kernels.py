"""The kernels of a call, named and checked against the backend's claim and against the call's stream."""

from dataclasses import replace

from attn_exp.backends.base import CLAIMED_SHARE, Backend
from attn_exp.core.case.case import HALVES
from attn_exp.core.record.request import Request
from attn_exp.timers.trace import Trace, operators, trace
from attn_exp.worker.attempt import Attempt, Stopped
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.prepare import PreparedBackend

# Two on equal inputs and one on others: a call that keeps results runs other kernels then, or none.
_TRACED_CALLS = 3
# On a CPU, a call that is interrupted by another program shows that time in whichever operator it was in.
_CPU_TRACES = 3
_KERNELS_KEPT = 24
# Kernels that add gradients to earlier ones, and are not the backend's: PyTorch's kernels of a sum, on a CPU its
# operator.
_ADDING = r"CUDAFunctor(OnSelf|OnOther)?_add|^aten::add_$"
# Less may be the code of kernels, which the driver loads when they are first launched.
_OUTSIDE_BYTES, _OUTSIDE_SHARE = 256 << 20, 0.1
# A GPU's own clock, which dates the records of a trace, advances in steps of up to 1 us: one at each end.
_LEFT_BEHIND_US = 2.0


def name_kernels(attempt: Attempt, machine: Machine, prepared: PreparedBackend, direction: str) -> float:
    """Record and check the kernels of one pass inside of its scope; return how many a call launches.

    Raises Stopped if other kernels ran than the backend claims, or the call's stream did not wait for all of them.
    """
    call, backend = prepared.calls[direction], prepared.backend
    l2 = attempt.request.measuring.l2

    def between(index: int) -> None:
        if index == _TRACED_CALLS - 1:
            prepared.check.contents.change(direction)

    with attempt.stage("kernels"):
        # By a call that is traced by itself: in a trace, copies of results lie beside the next one's.
        peak_bytes, passing_bytes = prepared.memory.of_pass(direction, call) if prepared.memory else (None, None)
        gpu = machine.gpu
        checked = attempt.request.compile.mode == "none" or not getattr(backend, "transparent", False)
        for _ in range(_CPU_TRACES if gpu is None else 1):
            traced = operators(call) if gpu is None else trace(gpu, l2, call, _TRACED_CALLS, between=between)
            wrong = _wrong_claim(attempt.request, backend, direction, machine.device, traced) if checked else None
            if wrong is None:
                break
        outside_bytes = _outside_bytes(attempt, prepared)
    workspace_bytes = attempt.passes[direction].workspace_bytes
    if passing_bytes is not None:
        workspace_bytes = (workspace_bytes or 0) + passing_bytes
    kernels, activity = traced.kernels(), traced.record() if machine.gpu is not None else None
    provider = getattr(backend, "kernel_provider", None)
    attempt.passes[direction] = replace(
        attempt.passes[direction],
        peak_memory_bytes=peak_bytes,
        outside_memory_bytes=outside_bytes,
        workspace_bytes=workspace_bytes,
        kernels=kernels[:_KERNELS_KEPT],
        activity=activity,
        took=provider("forward" if direction == "step" else direction, machine.device, kernels) if provider else None,
    )
    took = attempt.passes[direction].took
    expected = getattr(backend, "expected_provider", None)
    if wrong is None and took is not None and expected not in (None, took):
        wrong = f"{direction}: {backend.name} is to run {expected} here, and kernels of {took} ran"
    if outside_bytes and outside_bytes > max(_OUTSIDE_BYTES, _OUTSIDE_SHARE * (peak_bytes or 0)):
        attempt.flags.add("outside_memory")
    if traced.lossy:
        attempt.flags.add("profiler_lossy")
    elif machine.gpu is not None:
        attempt.traced[direction] = traced
    if machine.gpu is not None:
        idle = sum(not call.activities for call in traced.calls)
        if idle:
            which = "" if idle == len(traced.calls) else f" in {idle} of {len(traced.calls)} calls"
            raise Stopped("wrong_kernel", f"{direction}: {backend.name} ran no kernel at all{which}")
    if wrong is not None:
        raise Stopped("wrong_kernel", wrong)
    if activity is not None and activity.left_behind_us > _LEFT_BEHIND_US:
        streams = sorted(set[int]().union(*(call.left_on for call in traced.calls)))
        on = f"stream {streams[0]}" if len(streams) == 1 else f"streams {', '.join(map(str, streams))}"
        left = f"{activity.left_behind_us:,.1f} us of its work, on {on}"
        raise Stopped("implausible", f"{direction}: the stream that makes the call does not wait for {left}")
    return traced.launches


def _outside_bytes(attempt: Attempt, prepared: PreparedBackend) -> int | None:
    """Return the bytes outside of PyTorch's allocator that the backend took; None where others may have taken them."""
    alone = all(reading.get("processes", 0) <= 1 for reading in attempt.telemetry)
    return prepared.memory.outside_now() if prepared.memory and alone else None


def _wrong_claim(request: Request, backend: Backend, direction: str, device: str, traced: Trace) -> str | None:
    """Return why the trace is not what the backend claims to run, or None."""
    claims = dict.fromkeys(
        claim
        for half in (HALVES if direction == "step" else (direction,))
        if (claim := backend.claimed_kernels(half, device))
    )
    if not claims or (traced.lossy and not traced.loose):
        return None
    apart = _ADDING if request.measuring.accumulate and direction != "forward" else None
    shares = {claim: traced.share(claim, apart) for claim in claims}
    # A step runs the kernels of both halves.
    claim, least = min(shares.items(), key=lambda one: one[1])
    share, needed = sum(shares.values()) if least else 0.0, _needed_share(request, backend)
    if share > 0 and share >= needed:
        return None
    ran = ", ".join(kernel.name.split("(")[0] for kernel in traced.kernels()[:3]) or "nothing"
    took = f", and kernels of that name took {share:.1%} of the time instead of {needed:.0%}" if share else ""
    return f"{direction}: {backend.name} claims /{claim}/, but {ran} ran{took}"


def _needed_share(request: Request, backend: Backend) -> float:
    """Return the least share of the claimed kernels; one is enough in a block, or beside copies by torch.compile."""
    if request.case.workload is not None or request.compile.mode != "none":
        return 0.0
    return float(getattr(backend, "claimed_share", CLAIMED_SHARE))
