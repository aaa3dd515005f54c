from types import SimpleNamespace

import pytest
import torch.utils.benchmark
from fakes import FakeGpu
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.timers import loop, make_timer
from attn_exp.timers.benchmark import BenchmarkTimer
from attn_exp.timers.cpu import CpuTimer
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.event import EventTimer
from attn_exp.timers.loop import BLOCK_US, Block, Cost, sample
from attn_exp.timers.stopping import StoppingRule

RULE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=40, budget_s=1.5)


# The host is slow: flush, event, 50 us of Python, call, event cost it 54 us; the GPU works 20 + 10 us meanwhile.
def launch_bound():
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    return gpu, gpu.call(10.0, host_us=50.0)


def test_device_sees_the_gpus_time_alone_where_event_sees_the_host():
    gpu, call = launch_bound()
    assert EventTimer(gpu).block(call, 4).times_us == [34.0] * 4, "warm"
    gpu, call = launch_bound()
    timer = DeviceTimer(gpu)
    timer.estimate(call)
    assert timer.block(call, 4).times_us == [10.0] * 4


def test_a_block_is_held_for_as_long_as_the_host_is_slower_in_all_of_its_calls():
    gpu, call = launch_bound()
    timer = DeviceTimer(gpu)
    cost = timer.estimate(call)
    assert timer.host_bound
    assert (cost.time_us, cost.around_us) == (10.0, 20.0), "what the GPU does, whatever the host takes"
    gpu.log.clear()
    assert timer.block(call, 8).flags == ()
    (held_us,) = gpu.slept_us()
    # 54 us a call with some for the stamps, 30 of them beside the GPU's.
    least, most = (200 + 1.5 * (4 * us + 7 * (us - 30 / 1.5)) for us in (54, 55))
    assert least <= held_us <= most
    inside = ["flush", "event", "call", "event"] * 8
    assert [kind for kind, _ in gpu.log] == ["sleep", "stamp", *inside, "stamp", "event"]


def test_the_next_block_is_enqueued_while_one_runs_and_the_gpu_never_waits_for_the_host():
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    timer, call = DeviceTimer(gpu), gpu.call(5_000.0, host_us=50.0)
    timer.estimate(call)
    gpu.log.clear()
    gpu.call(1_000.0)()
    began = gpu.queue_free_us
    first, second = timer.enqueue(call, 3), timer.enqueue(call, 3)
    assert gpu.host_us < began, "both are in the queue before the first call runs"
    assert first().times_us == second().times_us == [5_000.0] * 3
    assert gpu.host_us == pytest.approx(began + 6 * 5_020, abs=10)
    assert gpu.slept_us() == []


@pytest.mark.parametrize(("gpu_us", "host_bound"), [(40.0, True), (65.0, False), (1000.0, False)])
def test_a_call_that_the_host_hardly_outruns_is_exact(gpu_us, host_bound):
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    timer, call = DeviceTimer(gpu), gpu.call(gpu_us, host_us=50.0)
    cost = timer.estimate(call)
    assert timer.host_bound is host_bound  # 1.5 * 55 = 82 against gpu_us + 20
    assert cost.time_us == pytest.approx(gpu_us, rel=0.05)
    block = timer.block(call, 5)
    assert (block.times_us, block.flags) == ([gpu_us] * 5, ())


def slower_from_now(gpu, call, host_us):
    def run():
        gpu.host_us += host_us
        call()

    return run


def test_a_late_block_in_the_queue_is_measured_again():
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    timer, call = DeviceTimer(gpu), gpu.call(70.0, host_us=50.0)
    timer.estimate(call)
    # Another program takes the host's time from now on.
    block = timer.enqueue(slower_from_now(gpu, call, 100.0), 8)()
    assert block.times_us == pytest.approx([70.0] * 8) and block.repeated_us >= 8 * 70.0


def test_a_block_whose_hold_ran_out_is_repeated_with_twice_the_hold():
    gpu, call = launch_bound()
    timer = DeviceTimer(gpu)
    timer.estimate(call)
    slow = slower_from_now(gpu, call, 200.0)
    gpu.log.clear()
    block = timer.block(slow, 5)
    first, *others = gpu.slept_us()
    assert others == [2 * first, 4 * first][: len(others)] and others
    assert (block.times_us, block.flags) == ([10.0] * 5, ()) and block.repeated_us >= 50
    for _ in range(3):
        timer.block(slow, 5)
    gpu.log.clear()
    timer.block(slow, 5)
    assert len(gpu.slept_us()) == 1, "a host that stays slow is learnt"


def test_a_call_that_synchronises_is_given_up_after_three_doublings_and_flagged():
    gpu, _ = launch_bound()
    timer, call = DeviceTimer(gpu), gpu.call(10.0, host_us=50.0, synchronizes=True)
    timer.estimate(call)
    gpu.log.clear()
    block = timer.block(call, 5)
    first, *others = gpu.slept_us()
    assert others == [2 * first, 4 * first, 8 * first]
    assert block.flags == ("unblocked",)
    assert len(block.times_us) == 5


@given(st.floats(0.5, 50), st.floats(1, 200), st.floats(0, 300), st.floats(0.5, 5000))
def test_device_is_exact_for_any_host_and_any_call_once_the_queue_runs(enqueue_us, flush_us, host_us, gpu_us):
    gpu = FakeGpu(enqueue_us=enqueue_us, flush_us=flush_us)
    timer, call = DeviceTimer(gpu), gpu.call(gpu_us, host_us=host_us)
    estimated_us, launch_us = timer.estimate(call).time_us, host_us + 4 * enqueue_us
    # The one call that a long estimate is from may have waited for its launch.
    assert gpu_us * (1 - 1e-6) <= estimated_us <= gpu_us * (1 + 1e-6) + launch_us
    block = timer.block(call, 10)
    assert block.times_us == pytest.approx([gpu_us] * 10, rel=1e-6)
    assert block.flags == ()


def test_a_whole_sampling_on_the_fake_gpu_is_exact():
    gpu, call = launch_bound()
    timing = sample(DeviceTimer(gpu), call, RULE)
    assert (timing.timer, timing.l2, timing.stop_reason, timing.flags) == ("device", "cold", "precise", ())
    # Seven rounds of the rule, and the one that is always checked.
    assert timing.times_us == (10.0,) * 50 * 8
    assert timing.rounds == tuple(index for index in range(8) for _ in range(50))
    assert timing.notes == {"calls_per_round": 50.0, "warm_up_calls": 150.0, "flush_us": 20.0}


@pytest.mark.parametrize(
    ("cost", "calls", "warm_up"),
    [
        (Cost(1.0), 50, 150),
        (Cost(1000.0), 15, 15),
        (Cost(990.0, 20.0), 15, 15),
        (Cost(14_000.0), 1, 3),
        (Cost(1e6), 1, 3),
        (Cost(10.0, 0.0, 40), 20, 150),
        (Cost(10.0, 0.0, 5000), 1, 150),
    ],
)
def test_a_block_and_the_warm_up_take_15_ms_and_fit_the_queue(cost, calls, warm_up):
    assert (cost.calls_in(BLOCK_US), cost.warm_up_calls) == (calls, warm_up)


class Scripted:
    name, l2, estimates = "scripted", "cold", True

    def __init__(self, cost, values=lambda index: 100.0, flags=()):
        self.cost, self.values, self.flags, self.blocks = cost, values, flags, []

    def estimate(self, call):
        return self.cost

    def block(self, call, calls):
        self.blocks.append(calls)
        return Block([self.values(len(self.blocks))] * calls, self.flags)


def test_warm_up_comes_first_in_blocks_and_is_not_in_the_samples():
    timer = Scripted(Cost(1000.0), values=lambda block: 999.0 if block <= 1 else 100.0)
    timing = sample(timer, lambda: None, RULE)
    # Seven rounds and the last one, each with a first call that is no sample.
    assert timer.blocks == [15] + [16] * 8
    assert timing.times_us == (100.0,) * 15 * 8


def test_samples_that_stay_noisy_end_at_the_last_round_with_all_of_them_kept():
    timer = Scripted(Cost(14_000.0), values=lambda block: 100.0 + 10 * (block % 2), flags=("unblocked",))
    timing = sample(timer, lambda: None, RULE)
    assert (timing.stop_reason, len(timing.times_us), timing.flags) == ("max_rounds", 41, ("unblocked",))
    assert timing.rounds == tuple(range(41))


def test_the_budget_ends_it_by_the_clock_once_it_is_stable(monkeypatch):
    timer = Scripted(Cost(20_000.0), values=lambda block: 100.0 + 4 * (block % 2))
    # A block takes an eighth of a second.
    clock = SimpleNamespace(perf_counter=lambda: 0.125 * len(timer.blocks))
    monkeypatch.setattr(loop, "time", clock)
    timing = sample(timer, lambda: None, RULE)
    assert (timing.stop_reason, len(timing.times_us)) == ("budget", 13)
    assert [round(end - begin, 3) for _, begin, end in timing.blocks] == [0.125] * 13


class Clock:
    """A host clock that only calls advance."""

    def __init__(self, monkeypatch, *first_us, then_us):
        self.now_ns, self.first, self.then_us, self.calls = 0, list(first_us), then_us, 0
        monkeypatch.setattr("attn_exp.timers.cpu.perf_counter_ns", lambda: self.now_ns)

    def __call__(self):
        self.calls += 1
        self.now_ns += int(1e3 * (self.first.pop(0) if self.first else self.then_us))


def test_a_cpu_sample_is_the_mean_of_as_many_calls_as_fill_a_millisecond(monkeypatch):
    timer, call = CpuTimer(), Clock(monkeypatch, 700.0, then_us=300.0)
    assert timer.estimate(call) == Cost(1200.0)
    call.calls = 0
    assert timer.block(call, 5).times_us == [300.0] * 5
    assert call.calls == 20


def test_benchmark_is_what_pytorchs_timer_measures(monkeypatch):
    call = Clock(monkeypatch, then_us=30.0)
    monkeypatch.setattr("attn_exp.timers.benchmark.perf_counter", lambda: call.now_ns / 1e9)
    timer = BenchmarkTimer()
    cost = timer.estimate(call)
    theirs = torch.utils.benchmark.Timer("call()", globals={"call": call}, timer=lambda: call.now_ns / 1e9)
    expected = theirs.adaptive_autorange(min_run_time=0.1)
    assert timer.loops == expected.number_per_run > 1
    assert cost.time_us == pytest.approx(expected.median * 1e6 * timer.loops) == pytest.approx(30.0 * timer.loops)
    call.calls = 0
    block = timer.block(call, 3)
    assert block.times_us == pytest.approx([30.0] * 3)
    assert block.notes == pytest.approx({"calls_per_sample": timer.loops, "autorange_us": expected.median * 1e6})
    assert call.calls == 3 * timer.loops


@pytest.mark.parametrize(("name", "gpu"), [("cpu", FakeGpu()), ("device", None), ("event", None)])
def test_a_timer_of_the_other_kind_of_device_is_refused(name, gpu):
    with pytest.raises(ValueError, match=f"timer '{name}' does not measure on a {'GPU' if gpu else 'CPU'}"):
        make_timer(name, gpu)
