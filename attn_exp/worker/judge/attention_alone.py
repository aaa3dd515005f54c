"""Judge the attention of a block without the block, whose output hides what a mistake of it changes.

A block computes q, k and v itself, so that hard values do not reach its attention, and what surrounds the attention
makes up most of its output.
"""

from dataclasses import replace

from attn_exp.backends.base import calls_of, load_backend, supported_passes
from attn_exp.core.case import NORMAL
from attn_exp.worker.attempt import Attempt, status_of
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.other_values import OtherValues
from attn_exp.worker.machine.device import HARD, Machine
from attn_exp.workloads import workload_of


def judge_attention_alone(attempt: Attempt, machine: Machine) -> None:
    """Prepare a backend once more, for its attention alone, and compare calls on normal and on hard values.

    A backend that does not support that case is not judged, nor is one where the memory does not hold both. It is not
    compiled as the block is.

    Raises:
        Stopped: a result is inaccurate.
    """
    request = replace(attempt.request, case=attempt.request.case.alone)
    backend, case, device = load_backend(request.backend), request.case, machine.device
    if backend.unsupported(case, device) or (
        attempt.with_gradients and "backward" not in supported_passes(backend, case)
    ):
        return
    try:
        with attempt.stage("first_call"):
            given, seeded = (
                workload_of(case).make_inputs(
                    case, device, request.measuring.seed, with_gradients=attempt.with_gradients
                )
                for _ in range(2)
            )
            calls = backend.prepare(case, given)
            if calls.attention is not None:
                # The function that the block calls, which need not be what `forward` computes.
                calls = calls_of(calls.attention, calls.inputs or given, calls.scope, calls.notes)
        judge = Judge(case, calls, given)
        with calls.scope():
            compared = OtherValues(attempt, machine, request, calls, judge, seeded, call="alone")
            for kind in (NORMAL, HARD):
                compared.compare(kind)
    except Exception as error:  # whatever does not fit
        if status_of(error, "")[0] != "out_of_memory":
            raise
