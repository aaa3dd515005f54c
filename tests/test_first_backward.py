"""First backwards of new forwards against the repeated one that is timed."""

import itertools
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeGpu, make_request

from attn_exp.core.judged import Judged
from attn_exp.core.record import FirstBackward, PassRecord
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge.cpu_time import CpuTimes
from attn_exp.worker.judge.first_backward import check_first_backward
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.stopped import Stopped

FRESH = SimpleNamespace(
    state="any", set_forward=lambda state: None, renew=lambda every=False: None, renew_gradient=lambda: None
)


def judge_of(first, forward=lambda: None, cpu=None):
    """A judge whose new forwards and first backwards are these calls, and who writes down what it looks at."""
    looked = []
    # No output lies where an earlier one lay.
    addresses = itertools.count()

    def made():
        forward()
        return SimpleNamespace(data_ptr=lambda: next(addresses))

    def look(gradients, out):
        looked.append(out)
        return len(looked)

    passes = {"backward": SimpleNamespace(cpu=cpu)}
    return SimpleNamespace(
        fresh=FRESH,
        beside=FRESH.state,
        passes=passes,
        looked=looked,
        look=look,
        forward=made,
        backward_of=lambda out: first,
    )


def checked(first_us, repeated_us, host_us=0.0, overwritten=False):
    """What is recorded of calls of so many microseconds on a fake GPU, whose host needs `host_us` to make one."""
    attempt, gpu = Attempt(make_request("fakes.Honest", passes=("forward", "backward"))), FakeGpu()
    attempt.passes["backward"] = PassRecord()
    attempt.judged.append(Judged(call="hard", passes=("backward",), inputs="hard values", overwritten=overwritten))

    def call(us):
        return lambda: gpu.call(us(), host_us=host_us)()

    judge = judge_of(call(first_us), call(lambda: 1000.0))
    try:
        told = check_first_backward(attempt, Machine("cpu", gpu=gpu), judge, {"backward": call(repeated_us)})
        attempt.notes = dict.fromkeys(told.values(), 1.0)
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


def test_other_forwards_lie_between_unless_the_output_is_overwritten():
    after = {"that of a new forward, after 10 other forwards,", "the one that was timed, after 11 other forwards,"}
    assert set(checked(lambda: 200.0, lambda: 200.0)[0].notes) == after | {
        "that of a new forward",
        "the one that was timed",
    }
    assert set(checked(lambda: 200.0, lambda: 200.0, overwritten=True)[0].notes) == {"that of a new forward"}


def test_a_long_call_on_a_cpu_is_compared_with_the_timed_calls_and_not_repeated():
    attempt = Attempt(make_request("fakes.Honest", passes=("forward", "backward")))
    attempt.passes["backward"] = PassRecord()
    judge = judge_of(lambda: None, cpu=CpuTimes([30_000.0, 40_000.0, 50_000.0]))
    calls = {"backward": lambda: pytest.fail("it is repeated")}
    check_first_backward(attempt, Machine("cpu"), judge, calls)
    found = attempt.passes["backward"].first_backward
    assert (found.calls, found.repeated_us) == (1, 40_000.0) and found.first_us < 30_000.0
    # It is freed before the new forward.
    assert calls == {}


def test_cpu_time_is_that_of_all_threads_and_not_of_waiting():
    times = CpuTimes()
    for work in (lambda: time.sleep(0.05), lambda: spin(0.02), lambda: in_a_thread(lambda: spin(0.02))):
        times.begin()
        work()
        times.end()
    slept, spun, elsewhere = times.times_us
    assert slept < 10_000 and min(spun, elsewhere) >= 20_000
    assert CpuTimes([3.0]).quartile_us(1) is None
    assert [CpuTimes([1.0, 2.0, 3.0]).quartile_us(quarter) for quarter in (1, 3)] == [1.0, 3.0]


def spin(seconds):
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("error", "status"), [(torch.OutOfMemoryError("CUDA out of memory"), "ok"), (RuntimeError("no more"), "error")]
)
def test_without_memory_for_a_second_graph_nothing_is_compared_and_the_record_says_so(error, status):
    def fails():
        raise error

    attempt, machine = Attempt(make_request("fakes.Honest", passes=("forward", "backward"))), Machine("cpu")
    attempt.passes["backward"] = PassRecord()
    judge = judge_of(lambda: None, forward=fails)
    attempt.run(lambda: check_first_backward(attempt, machine, judge, {"backward": lambda: None}) and None)
    assert attempt.status == status
    assert attempt.passes["backward"].first_backward == (FirstBackward(calls=0) if status == "ok" else None)
