import pytest
from fakes import MAIN_STREAM, FakeGpu, fake_activities

from attn_exp.core.record.record import Kernel, Traced
from attn_exp.timers.kernel import KernelTimer, ProfilerLost
from attn_exp.timers.trace import trace

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


def test_calls_that_launch_different_kernels_are_known_one_by_one(monkeypatch):
    found = traced(monkeypatch, (("flash_fwd", 10.0),), (("flash_fwd", 10.0), ("copy", 4.0)), number=4)
    assert names(found) == [["flash_fwd"], ["flash_fwd", "copy"]] * 2
    assert (found.lossy, found.launches) == (False, 1.5)
    assert found.kernels()[1] == Kernel(name="copy", count=0.5, time_us=2.0)
    assert found.record().calls_differ
    assert found.record().sum_us == pytest.approx(12.0)


@pytest.mark.parametrize("lost", [1, 2, 4, 15])
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
