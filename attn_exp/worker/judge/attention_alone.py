"""Judge the attention of a block without the block, whose output hides what a mistake of it changes.

A block computes q, k and v itself, so that hard values do not reach its attention, and what surrounds the attention
makes up most of its output.
"""

from dataclasses import replace

from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.case import NORMAL
from attn_exp.worker.attempt import Attempt, error_summary, status_of
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.other_values import OtherValues
from attn_exp.worker.machine.device import HARD, Machine
from attn_exp.worker.stopped import Stopped
from attn_exp.workloads import workload_of


def judge_attention_alone(attempt: Attempt, machine: Machine, calls: Calls, *, again: bool = False) -> None:
    """Call the very function that a block calls, on normal and on hard values of its shapes and layout, and compare.

    Nothing is prepared for it, so that it is what was prepared for the block. It is compiled if the block is.

    Args:
        attempt: the job; gets what was judged.
        machine: keeps references for other jobs of the same case.
        calls: of the block; their scope is entered.
        again: whether it was judged before, and calls were timed since: what a backend does otherwise from some call on
            shows then. Where the memory does not hold these calls any more there are none.

    Raises:
        Stopped: a result is inaccurate, or the memory does not hold these calls beside the block.
    """
    assert calls.alone is not None
    request = replace(attempt.request, case=attempt.request.case.alone)
    case = request.case
    try:
        with attempt.stage("first_call"):
            given, seeded = (
                workload_of(case).make_inputs(
                    case, machine.device, request.measuring.seed, with_gradients=attempt.with_gradients
                )
                for _ in range(2)
            )
        of_attention = calls_of(calls.alone, given, calls.scope, calls.notes)
        judge = Judge(case, of_attention, given)
        compared = OtherValues(attempt, machine, request, of_attention, judge, seeded, call="alone")
        for kind in (NORMAL, HARD):
            (compared.compare_again if again else compared.compare)(kind)
    except Exception as error:
        if status_of(error, "")[0] != "out_of_memory":
            raise
        if again:
            return
        reason = f"the attention alone, which is judged beside the block: {error_summary(error)}"
        raise Stopped("out_of_memory", reason) from error
