"""Checks of what a server's memory is like: free slots that hold anything, and last pages that are not full."""

from dataclasses import replace

import torch

from attn_exp.attention.contents import Contents
from attn_exp.attention.expected import Expected
from attn_exp.attention.inputs import Inputs, has_room
from attn_exp.backends.base import Backend, Calls
from attn_exp.core.case.case import GIVEN, NORMAL, Case
from attn_exp.core.record.checked import Judged
from attn_exp.worker.attempt import Attempt, Stopped, status_of
from attn_exp.worker.check.form import ResultForm
from attn_exp.worker.check.values import ValuesCheck
from attn_exp.worker.machine.device import Machine
from attn_exp.workloads.base import Workload

# Requests of the case with shorter lengths: each of them needs pages of its own beside the case's.
_REQUESTS = 4


def reads_free_slots(
    attempt: Attempt, calls: Calls, contents: Contents, form: ResultForm, expected: Expected
) -> bool | None:
    """Return whether a NaN in memory that belongs to no request reaches the output; None if there is no such memory.

    That is slots behind a request's last key, pages that nobody has, and what lies behind packed tokens. Raises Stopped
    if the output changes otherwise: then numbers there would change it, too.
    """
    case = attempt.request.case
    room = has_room(case) and attempt.request.measuring.inputs != GIVEN
    with contents.free_as(torch.nan, room=room) as free:
        if not free:
            return None
        with attempt.stage("first_call"):
            out = form.results("forward", calls.forward())["out"].clone()
    finite = out.isfinite().all(-1)
    rows, reads = finite.numel(), not bool(finite.all())
    if not reads:
        error = expected.judge("out", out, calls.scales.get("out", 1.0))
        assert error.relative is not None and error.tolerance is not None
        if error.relative > error.tolerance:
            raise Stopped("inaccurate", f"with NaN in {free} out is off by {error.relative:.2g} of its norm")
    what = f"NaN in {free} (it reaches {int((~finite).sum()):,} of {rows:,} rows of out)"
    attempt.judged.append(Judged(call="free", passes=("forward",), inputs=what, rows=rows, rows_of=rows))
    return reads


def check_shorter(attempt: Attempt, machine: Machine, backend: Backend, workload: Workload) -> None:
    """Check a few requests whose last page is not full, if those of the case all are.

    Keys that lie behind the last one of a page are counted by some kernels only then. Raises Stopped.
    """
    case = shortened(attempt.request.case)
    if case is None or backend.unsupported(case, machine.device) is not None:
        return
    request = replace(attempt.request, case=case)
    try:
        with attempt.stage("first_call"):
            given, seeded = (
                workload.make_inputs(case, machine.device, request.measuring.seed, with_gradients=False)
                for _ in range(2)
            )
            calls = workload.calls(backend, case, given)
            if calls.inputs is None:
                calls = replace(calls, inputs=given)
        assert isinstance(seeded, Inputs)
        form = ResultForm(given, calls.scales)
        check = ValuesCheck(attempt, machine, request, calls, Contents(calls.inputs or given), form, seeded, "shorter")
        with calls.scope():
            check.check(NORMAL)
    except Exception as error:
        # It stays unknown if there is no memory for it beside the case.
        if status_of(error, "")[0] != "out_of_memory":
            raise


def shortened(case: Case) -> Case | None:
    """Return at most four requests of a case, each with half of a page less; None if a last page is not full."""
    size = case.page_size
    if size is None or size == 1:
        return None
    lengths = case.kv_lengths or case.lengths or (case.kv_len,) * case.batch
    queries = case.lengths or (case.q_len,) * case.batch
    if any(length % size for length in lengths):
        return None
    several = list(zip(queries, lengths, strict=True))[:_REQUESTS]
    shorter = [(q, keys - size // 2) for q, keys in several if 0 < q <= keys - size // 2]
    if not shorter:
        return None
    if case.lengths is None:
        return replace(case, batch=len(shorter), kv_len=shorter[0][1])
    own = tuple(q for q, _ in shorter), tuple(keys for _, keys in shorter)
    return replace(case, lengths=own[0], kv_lengths=own[1], q_len=sum(own[0]), kv_len=sum(own[1]))
