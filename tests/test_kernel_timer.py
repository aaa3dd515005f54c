import pytest
import torch
from fakes import FakeGpu

from attn_exp.core.record import Kernel
from attn_exp.timers import kernel as kernel_timer
from attn_exp.timers.kernel import Activity, KernelTimer, ProfilerLost, Trace, operators, split_calls, trace

FLUSH = ("memset", 20.0)
CALL = (("flash_fwd", 10.0), ("combine", 2.0), ("combine", 3.0))


def session(calls, call=CALL):
    names = [kernel for _ in range(calls) for kernel in (FLUSH, *call)]
    return [Activity(name, 1000 * i, time_us) for i, (name, time_us) in enumerate(names)]


def test_a_whole_session_is_cut_into_its_calls_without_the_flush():
    found = split_calls(session(5), 5)
    assert not found.lossy
    assert [[(a.name, a.time_us) for a in call] for call in found.calls] == [list(CALL)] * 5
    assert found.kernels() == (
        Kernel(name="flash_fwd", count=1, time_us=10.0),
        Kernel(name="combine", count=2, time_us=5.0),
    )


@pytest.mark.parametrize("lost", range(4 * 5))
def test_one_lost_record_is_lossy_wherever_it_was(lost):
    found = session(5)
    del found[lost]
    assert split_calls(found, 5).lossy


def test_a_whole_lost_call_is_lossy():
    assert split_calls(session(4), 5).lossy
    assert split_calls(session(6), 5).lossy


@pytest.mark.parametrize("lost", range(1, 20))
def test_a_buffer_lost_in_the_middle_or_at_an_end_is_lossy(lost):
    for begin in (0, 3, 4, 20 - lost):
        found = session(5)
        del found[begin : begin + lost]
        assert split_calls(found, 5).lossy


def test_a_lossy_session_has_no_calls_and_so_no_kernels_of_nobody_knows_whom():
    empty = split_calls([], 5)
    assert (empty.lossy, empty.calls, empty.kernels()) == (True, (), ())
    # Cut into equal parts all the same, two of these four "calls" were a flush, and one the end of the call before.
    found = [("flush", 23.0), ("a", 100.0), ("b", 1.0)] * 4
    del found[2]
    lost = split_calls([Activity(name, i, us) for i, (name, us) in enumerate(found)], 4)
    assert (lost.lossy, lost.calls, lost.kernels()) == (True, (), ())
    assert lost.launches == pytest.approx(2, abs=0.5), "how many launches fit into the queue is known all the same"


def test_flushes_alone_are_calls_that_launched_nothing():
    found = split_calls(session(5, call=()), 5)
    assert (found.lossy, found.calls, found.launches) == (False, ((),) * 5, 0)


def test_a_call_may_begin_with_a_kernel_of_the_flushs_name():
    found = split_calls(session(5, call=(FLUSH, *CALL)), 5)
    assert not found.lossy
    assert len(found.calls[0]) == 4


def test_a_session_of_which_each_call_lost_a_different_kernel_is_lossy():
    found = session(4)
    for call, lost in reversed([(0, 1), (1, 2), (2, 3), (3, 1)]):
        del found[4 * call + lost]
    assert split_calls(found, 4).lossy


def test_a_lossy_session_is_tried_once_more(monkeypatch):
    sessions = [session(3)[1:], session(3)]
    ran = []

    def activities(run):
        run()
        ran.append(1)
        return sessions.pop(0)

    monkeypatch.setattr(kernel_timer, "activities", activities)
    gpu = FakeGpu()
    assert not trace(gpu, "cold", gpu.call(5.0), 3).lossy
    assert [kind for kind, _ in gpu.log] == ["flush", "call"] * 6
    sessions = [session(3)]
    trace(gpu, "cold", gpu.call(5.0), 3)
    assert len(ran) == 3


def test_the_kernel_timer_reports_the_sum_of_each_call_and_has_no_samples_of_a_lossy_session(monkeypatch):
    monkeypatch.setattr(kernel_timer, "trace", lambda gpu, l2, call, calls: split_calls(session(calls), calls))
    timer, call = KernelTimer(FakeGpu()), lambda: None
    assert (timer.estimate(call).time_us, timer.estimate(call).kernels) == (15.0, 3)
    assert (timer.block(call, 4).times_us, timer.block(call, 4).flags) == ([15.0] * 4, ())
    monkeypatch.setattr(kernel_timer, "trace", lambda gpu, l2, call, calls: split_calls(session(calls)[:-1], calls))
    for use in (lambda: timer.estimate(call), lambda: timer.block(call, 4)):
        with pytest.raises(ProfilerLost, match="lost kernel records, or calls differ in what they run: set"):
            use()


@pytest.mark.parametrize("found", [Trace((), True, 1.0), Trace(((),), False, 0.0)], ids=["no records", "no launches"])
def test_the_kernel_timer_without_kernels_raises_and_makes_no_zero(monkeypatch, found):
    monkeypatch.setattr(kernel_timer, "trace", lambda *_: found)
    for use in (lambda timer: timer.estimate(lambda: None), lambda timer: timer.block(lambda: None, 1)):
        with pytest.raises(ProfilerLost, match="the profiler saw no kernels"):
            use(KernelTimer(FakeGpu()))


def test_operators_of_a_call_on_the_cpu_are_counted_with_their_nested_ones():
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    found = {kernel.name: kernel for kernel in operators(lambda: torch.softmax(a @ a, -1) + torch.relu(a) + 1)}
    assert found["aten::softmax"].count == found["aten::_softmax"].count == 1
    assert found["aten::add"].count == 2
    assert all(kernel.time_us > 0 for kernel in found.values())
    times = [kernel.time_us for kernel in found.values()]
    assert times == sorted(times, reverse=True)
