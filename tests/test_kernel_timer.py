from itertools import pairwise

import pytest
import torch
from fakes import MAIN_STREAM, FakeGpu, fake_activities

from attn_exp.core.record import Kernel, Traced
from attn_exp.timers.kernel import KernelTimer, ProfilerLost
from attn_exp.timers.operators import operators
from attn_exp.timers.timed_call import TimedCall
from attn_exp.timers.trace import MARK, Activity, Trace, TracedCall, split_calls, trace, union_us

CALL = (("flash_fwd", 10.0), ("combine", 2.0), ("combine", 3.0))
SIDE = 20


def traced(monkeypatch, *calls, number=3, **how):
    """A trace of `number` calls that run the kernels of `calls` in turn."""
    gpu = FakeGpu()
    monkeypatch.setattr("attn_exp.timers.trace.activities", fake_activities(gpu, *calls, **how))
    return trace(gpu, "cold", gpu.call(5.0), number)


def names(found):
    return [[activity.name for activity in call.activities] for call in found.calls]


def test_a_session_is_cut_into_its_calls_by_the_marks_and_without_the_flush(monkeypatch):
    found = traced(monkeypatch, CALL, number=5)
    assert names(found) == [["flash_fwd", "combine", "combine"]] * 5
    assert (found.lossy, found.launches) == (False, 3.0)
    assert found.kernels() == (
        Kernel(name="flash_fwd", count=1, time_us=10.0),
        Kernel(name="combine", count=2, time_us=5.0),
    )
    assert found.record() == Traced(sum_us=15.0, union_us=15.0, span_us=15.0, streams=(MAIN_STREAM,))


def test_a_call_may_run_kernels_of_the_flushs_name(monkeypatch):
    assert names(traced(monkeypatch, (("memset", 1.0), *CALL))) == [["memset", *(name for name, _ in CALL)]] * 3


def test_calls_that_launch_different_kernels_are_known_one_by_one(monkeypatch):
    found = traced(monkeypatch, (("flash_fwd", 10.0),), (("flash_fwd", 10.0), ("copy", 4.0)), number=4)
    assert names(found) == [["flash_fwd"], ["flash_fwd", "copy"]] * 2
    assert (found.lossy, found.launches) == (False, 1.5)
    assert found.kernels()[1] == Kernel(name="copy", count=0.5, time_us=2.0)
    assert found.record().calls_differ
    assert found.record().sum_us == pytest.approx(12.0)


@pytest.mark.parametrize("lost", range(8 * 2))
def test_a_lost_mark_is_lossy_wherever_it_was_and_a_lost_kernel_is_one_less(monkeypatch, lost):
    # Eight records a call: hold, flush, mark, three kernels, mark, mark.
    found = traced(monkeypatch, CALL, number=2, lost=[lost])
    if lost % 8 in (0, 2, 6, 7):
        assert (found.lossy, found.calls, found.record()) == (True, (), None)
        assert [kernel.name for kernel in found.kernels()] == ["flash_fwd", "combine"]
    else:
        assert not found.lossy
        assert sum(map(len, names(found))) == 6 - (lost % 8 != 1)


def test_a_lossy_session_is_repeated_twice_and_then_what_it_saw_is_kept_without_flush_and_marks(monkeypatch):
    gpu, sessions = FakeGpu(), []
    recorder = fake_activities(gpu, CALL)

    def activities(run, lossy=(True, True, False)):
        sessions.append(recorder(run))
        return sessions[-1][:-1] if lossy[len(sessions) - 1] else sessions[-1]

    monkeypatch.setattr("attn_exp.timers.trace.activities", activities)
    assert not trace(gpu, "cold", gpu.call(5.0), 3).lossy
    assert len(sessions) == 3
    sessions.clear()
    monkeypatch.setattr(
        "attn_exp.timers.trace.activities", lambda run: activities(run, (True, True, True, False, False))
    )
    found = trace(gpu, "cold", gpu.call(5.0), 3)
    assert (len(sessions), found.lossy, found.loose_calls) == (4, True, 3)
    assert {activity.name for activity in found.loose} == {"flash_fwd", "combine"}
    assert found.kernels()[0] == Kernel(name="flash_fwd", count=1.0, time_us=10.0)
    assert found.share("flash") == pytest.approx(10 / 15)


def test_a_profiler_that_records_nothing_is_no_evidence(monkeypatch):
    found = traced(monkeypatch, CALL, lost=range(1000))
    assert (found.lossy, found.loose, found.kernels(), found.share("flash")) == (True, (), (), 0.0)


def test_marks_alone_are_calls_that_launched_nothing(monkeypatch):
    found = traced(monkeypatch, number=5)
    assert (found.lossy, names(found), found.launches) == (False, [[]] * 5, 0)


def test_a_call_is_held_back_until_it_is_enqueued_and_traced_with_new_inputs(monkeypatch):
    gpu, done = FakeGpu(), []
    monkeypatch.setattr("attn_exp.timers.trace.activities", fake_activities(gpu, CALL))
    call = gpu.call(5.0, host_us=400.0)
    trace(gpu, "cold", TimedCall(lambda: call() or "out", lambda: done.append("before"), done.append), 2)
    assert done == ["before", "out"] * 2
    order = [kind for kind, _ in gpu.log]
    assert order == ["sleep", "flush", "mark", "call", "mark", "mark"] * 2
    assert gpu.slept_us()[1] > 1.4 * 400.0, "the first call told how long the host takes"


def test_a_call_that_waits_for_the_gpu_does_not_make_the_hold_grow_without_end(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr("attn_exp.timers.trace.activities", fake_activities(gpu, CALL))
    trace(gpu, "cold", gpu.call(5.0, synchronizes=True), 12)
    assert max(gpu.slept_us()) <= 2000.0


def test_kernels_of_a_side_stream_that_is_waited_for_belong_to_the_call(monkeypatch):
    call = (("half", 100.0), ("other half", 120.0, SIDE, 5.0))
    found = traced(monkeypatch, call, joined=True)
    assert found.record() == Traced(
        sum_us=220.0, union_us=pytest.approx(125.0), span_us=pytest.approx(125.0), streams=(MAIN_STREAM, SIDE)
    )


@pytest.mark.parametrize(
    ("kernel", "left_us"),
    [
        (("half", 120.0, SIDE, 5.0), 25.0),  # outlasts the call's stream
        (("half", 50.0, SIDE, 150.0), 50.0),  # begins when that is through
        (("half", 12.0, SIDE, -15.0), 12.0),  # runs while the call is held, before its inputs are there
        (("half", 20.0, SIDE, -15.0), 15.0),
    ],
)
def test_work_that_the_calls_stream_does_not_wait_for_is_found(monkeypatch, kernel, left_us):
    found = traced(monkeypatch, (("half", 100.0), kernel))
    assert found.record().left_behind_us == pytest.approx(left_us, abs=1.01)
    assert [call.left_on for call in found.calls] == [(SIDE,)] * 3
    assert found.record().sum_us == pytest.approx(100.0 + kernel[1])


def test_a_union_counts_what_overlaps_once():
    assert union_us([]) == 0.0
    assert union_us([(0, 1000), (500, 2000), (600, 700), (3000, 4000), (4000, 5000)]) == 4.0
    assert TracedCall(()).span_us == 0.0


def test_a_share_counts_nested_operators_once_and_streams_apart():
    def on(name, begin_us, us, stream=1):
        return Activity(name, begin_us * 1000, us, stream)

    nested = (on("aten::softmax", 0, 30.0), on("aten::_softmax", 5, 20.0), on("aten::mm", 30, 70.0))
    found = Trace((TracedCall(nested),), 3.0)
    assert found.share("softmax") == pytest.approx(0.3)
    assert found.share("_softmax") == pytest.approx(0.2)
    assert found.share("nothing") == 0.0
    assert Trace((TracedCall((on("a", 0, 10.0), on("b", 0, 30.0, 2))),), 2.0).share("a") == pytest.approx(0.25)


def test_the_kernel_timer_reports_the_sum_of_each_call_and_notes_their_union(monkeypatch):
    gpu = FakeGpu()
    timer, call = KernelTimer(gpu), gpu.call(5.0)
    kernels = (*CALL, ("side", 10.0, SIDE, 2.0))
    monkeypatch.setattr("attn_exp.timers.trace.activities", fake_activities(gpu, kernels, joined=True))
    cost = timer.estimate(call)
    assert (cost.time_us, cost.kernels) == (25.0, 4)
    block = timer.block(call, 4)
    assert (block.times_us, block.flags) == ([25.0] * 4, ())
    assert block.notes == {"union_us": pytest.approx(15.0), "span_us": pytest.approx(15.0), "streams": 2.0}


@pytest.mark.parametrize(
    ("kernels", "lost", "words"),
    [
        ((CALL,), [0], "the profiler lost kernel records: set timer=device"),
        ((CALL,), range(1000), "the profiler saw no kernels"),
        ((), [], "the profiler saw no kernels"),
        ((CALL, ()), [], "the profiler saw no kernels"),
    ],
    ids=["lost", "no records", "no launches", "a call without"],
)
def test_the_kernel_timer_without_kernels_raises_and_makes_no_zero(monkeypatch, kernels, lost, words):
    gpu = FakeGpu()
    monkeypatch.setattr("attn_exp.timers.trace.activities", fake_activities(gpu, *kernels, lost=lost))
    for use in (lambda timer, call: timer.estimate(call), lambda timer, call: timer.block(call, 2)):
        with pytest.raises(ProfilerLost, match=words):
            use(KernelTimer(gpu), gpu.call(5.0))


def test_one_mark_more_or_less_and_nothing_is_assigned():
    marks = [Activity(f"{MARK}(long)", 1000 * i, 0.5) for i in range(9)]
    assert [split_calls(marks[:n], 2).lossy for n in (7, 8, 9)] == [True, False, True]


def test_operators_of_a_call_on_the_cpu_are_counted_with_their_nested_ones():
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    traced = operators(lambda: torch.softmax(a @ a, -1) + torch.relu(a) + 1)
    found = {kernel.name: kernel for kernel in traced.kernels()}
    assert found["aten::softmax"].count == found["aten::_softmax"].count == 1
    assert found["aten::add"].count == 2
    assert all(kernel.time_us > 0 for kernel in found.values())
    times = [kernel.time_us for kernel in traced.kernels()]
    assert all(first >= second for first, second in pairwise(times))
    assert traced.launches == sum(kernel.count for kernel in found.values())
    assert traced.share("aten::softmax") > traced.share("aten::_softmax") > 0
    assert traced.share("aten::") == 1.0
