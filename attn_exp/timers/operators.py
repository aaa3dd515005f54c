"""The operators of a call on a CPU, by PyTorch's profiler: as the trace of one call, or with their tensors' shapes."""

from typing import Any

from attn_exp.timers.kineto import silent_profile
from attn_exp.timers.timed_call import Call, as_timed
from attn_exp.timers.trace import Activity, Trace, TracedCall


def operators(call: Call) -> Trace:
    """Return all ATen operators of one call on the CPU, nested ones included, as a trace of one call."""
    ran = [
        Activity(event.name(), event.start_ns(), event.duration_ns() / 1e3, event.start_thread_id())
        for event in _events(call)
    ]
    return Trace((TracedCall(tuple(sorted(ran, key=lambda activity: activity.start_ns))),), float(len(ran)))


def sized_operators(call: Call) -> list[tuple[str, list[list[int]], float]]:
    """Return the name of each ATen operator of one call, its tensors' shapes, and its FLOPs where it multiplies."""
    return [
        (event.name(), event.shapes(), float(event.flops()))
        for event in _events(call, record_shapes=True, with_flops=True)
    ]


def _events(call: Call, **options: Any) -> list[Any]:
    timed = as_timed(call)
    timed.before()
    with silent_profile(use_cpu=True, use_kineto=True, **options) as session:
        result = timed.run()
    timed.after(result)
    return [event for event in session.kineto_results.events() if event.name().startswith("aten::")]
