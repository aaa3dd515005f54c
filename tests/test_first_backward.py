"""First backwards of new forwards against the repeated one that is timed."""

import random
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeGpu, make_request

from attn_exp.core.record import FirstBackward, PassRecord
from attn_exp.worker import first_backward
from attn_exp.worker.attempt import Attempt, Stopped
from attn_exp.worker.device import Machine
from attn_exp.worker.first_backward import check_first_backward

FRESH = SimpleNamespace(state="the timed forward's", set_forward=lambda state: None, renew_gradient=lambda: None)


def checked(first_us, repeated_us, host_us=0.0):
    """What is recorded of calls of so many microseconds on a fake GPU, whose host needs `host_us` to make one."""
    attempt, gpu = Attempt(make_request("fakes.Honest", passes=("forward", "backward"))), FakeGpu()
    attempt.passes["backward"] = PassRecord()

    def call(us):
        return lambda: gpu.call(us(), host_us=host_us)()

    judge = SimpleNamespace(fresh=FRESH, new_backward=lambda: call(first_us))
    try:
        check_first_backward(attempt, Machine("cpu", gpu=gpu), judge, call(repeated_us))
    except Stopped as stopped:
        attempt.status, attempt.reason = stopped.status, stopped.reason
    return attempt, attempt.passes["backward"].first_backward


@pytest.mark.parametrize(("length_us", "calls"), [(200.0, 2), (50_000.0, 1)])
def test_a_backward_that_does_the_same_work_each_time_costs_two_rounds_or_one(length_us, calls):
    attempt, found = checked(lambda: length_us, lambda: length_us)
    assert (attempt.status, attempt.reason) == ("ok", None)
    assert found == FirstBackward(first_us=length_us, repeated_us=length_us, calls=calls)


# The host needs longer to make a call than the GPU to run it: the stream is held meanwhile.
@pytest.mark.parametrize("host_us", [0.0, 900.0, 5_000.0])
def test_what_the_first_backward_of_a_forward_keeps_is_implausible(host_us):
    attempt, found = checked(lambda: 300.0, lambda: 230.0, host_us)
    assert attempt.status == "implausible"
    assert attempt.reason == (
        "backward: the first backward of a forward takes 300.0 us, the repeated ones that were timed 230.0 us: "
        "what was computed by then was kept"
    )
    assert found == FirstBackward(first_us=300.0, repeated_us=230.0, calls=24)


def test_noise_is_no_difference():
    dice = random.Random(5)
    for spread in (0.02, 0.3, 1.0):
        for _ in range(100):
            attempt, _ = checked(*[lambda spread=spread: 200.0 * dice.lognormvariate(0.0, spread)] * 2)
            assert attempt.status == "ok"


@pytest.mark.parametrize(
    ("error", "status"), [(torch.OutOfMemoryError("CUDA out of memory"), "ok"), (RuntimeError("no more"), "error")]
)
def test_without_memory_for_a_second_graph_nothing_is_compared_and_the_record_says_so(error, status):
    def fails():
        raise error

    attempt, machine = Attempt(make_request("fakes.Honest", passes=("forward", "backward"))), Machine("cpu")
    attempt.passes["backward"] = PassRecord()
    judge = SimpleNamespace(fresh=FRESH, new_backward=fails)
    attempt.run(lambda: check_first_backward(attempt, machine, judge, lambda: None))
    assert attempt.status == status
    assert attempt.passes["backward"].first_backward == (FirstBackward(calls=0) if status == "ok" else None)


def test_the_share_that_is_called_longer_is_five_standard_deviations_from_a_half():
    n = first_backward._MOST
    deviations = (first_backward._SHARE - 0.5) * n * n / (n * n * (2 * n + 1) / 12) ** 0.5
    assert deviations == pytest.approx(5.0, abs=0.1)
