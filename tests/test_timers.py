import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import FakeGpu
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.core.paired_test import abba_order
from attn_exp.timers import loop, make_timer
from attn_exp.timers.cpu import CpuTimer
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.event import EventTimer
from attn_exp.timers.kernel import KernelTimer
from attn_exp.timers.loop import RIVALS_ROUND_US, ROUND_US, Block, Cost, Entry, sample, sample_rivals, single_block
from attn_exp.timers.stopping import StoppingRule
from attn_exp.timers.timed_call import TimedCall
from attn_exp.timers.wall import WallTimer

RULE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=40, budget_s=1.5)


# The host is slow: flush, event, 50 us of Python, call, event cost it 54 us; the GPU works 20 + 10 us meanwhile.
def launch_bound():
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    return gpu, gpu.call(10.0, host_us=50.0)


def test_device_sees_the_gpus_time_alone_where_event_sees_the_host():
    gpu, call = launch_bound()
    assert EventTimer(gpu).block(call, 4).times_us == [42.0, 34.0, 34.0, 34.0]
    gpu, call = launch_bound()
    timer = DeviceTimer(gpu)
    timer.estimate(call)
    assert timer.block(call, 4).times_us == [10.0] * 4


def test_device_blocks_the_stream_when_enqueueing_is_slower_and_for_as_long_as_it_takes():
    gpu, call = launch_bound()
    timer = DeviceTimer(gpu)
    cost = timer.estimate(call)
    assert timer.blocked
    assert (cost.time_us, cost.around_us) == (10.0, 20 + 1.5 * 54)
    gpu.log.clear()
    assert timer.block(call, 8).flags == ()
    assert gpu.slept_us() == [1.5 * 54 * 8]
    assert [kind for kind, _ in gpu.log] == ["sleep", "event"] + ["flush", "event", "call", "event"] * 8


@pytest.mark.parametrize(("gpu_us", "blocked"), [(60.0, True), (62.0, False), (1000.0, False)])
def test_device_does_not_block_when_the_gpu_is_slower_than_one_and_a_half_times_the_host(gpu_us, blocked):
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    timer, call = DeviceTimer(gpu), gpu.call(gpu_us, host_us=50.0)
    cost = timer.estimate(call)
    assert timer.blocked is blocked  # 1.5 * 54 = 81 against gpu_us + 20
    assert cost.time_us == pytest.approx(gpu_us, rel=0.05)
    gpu.log.clear()
    block = timer.block(call, 5)
    calls_slept_for = 5 if blocked else 1
    assert gpu.slept_us() == pytest.approx([81.0 * calls_slept_for])
    assert block.times_us == [gpu_us] * 5
    assert block.flags == ()


def test_the_flush_is_in_the_estimate_and_not_in_the_time():
    gpu = FakeGpu(enqueue_us=0.1, flush_us=70.0)
    timer, call = DeviceTimer(gpu), gpu.call(25.0)
    cost = timer.estimate(call)
    assert (cost.time_us, cost.around_us) == (pytest.approx(25.0), pytest.approx(70.0))
    assert timer.block(call, 5).times_us == pytest.approx([25.0] * 5)


def slower_from_now(gpu, call, host_us):
    def run():
        gpu.host_us += host_us
        call()

    return run


def test_a_blocker_that_ran_out_is_discarded_and_doubled():
    gpu, call = launch_bound()
    timer = DeviceTimer(gpu)
    timer.estimate(call)
    gpu.log.clear()
    block = timer.block(slower_from_now(gpu, call, 100.0), 5)  # 154 us a call: over 81, within 162
    assert gpu.slept_us() == [81.0 * 5, 162.0 * 5]
    assert (block.times_us, block.flags) == ([10.0] * 5, ())
    gpu.log.clear()
    timer.block(slower_from_now(gpu, call, 100.0), 5)
    assert len(gpu.slept_us()) == 1, "the next blocker has learnt how slow the host is"


def test_a_blocker_that_holds_at_no_length_is_given_up_after_two_doublings_and_flagged():
    gpu, _ = launch_bound()
    timer, call = DeviceTimer(gpu), gpu.call(10.0, host_us=50.0, synchronizes=True)
    timer.estimate(call)
    gpu.log.clear()
    block = timer.block(call, 5)
    first, *others = gpu.slept_us()
    assert others == [2 * first, 4 * first]
    assert block.flags == ("unblocked",)
    assert len(block.times_us) == 5


def test_a_call_that_synchronizes_does_not_make_the_blockers_grow_without_end():
    gpu, _ = launch_bound()
    timer, call = DeviceTimer(gpu), gpu.call(10.0, host_us=50.0, synchronizes=True)
    timer.estimate(call)
    for _ in range(20):
        assert timer.block(call, 5).flags == ("unblocked",)
    assert max(gpu.slept_us()) < 100_000.0


def test_the_first_call_of_an_unblocked_block_does_not_wait_for_the_host():
    # Calls above 15 ms come one a block, so that each of them is a first one.
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    timer, call = DeviceTimer(gpu), gpu.call(20_000.0, host_us=5_000.0)
    assert timer.estimate(call).calls_in(RIVALS_ROUND_US) == 1
    assert timer.block(call, 1).times_us == [20_000.0]


def test_an_event_timer_and_a_device_timer_agree_on_long_calls_after_the_first():
    gpu = FakeGpu()
    call = gpu.call(500.0, host_us=20.0)
    timer = EventTimer(gpu)
    assert timer.estimate(call).time_us == 500.0
    assert timer.block(call, 6).times_us[1:] == [500.0] * 5


@given(st.floats(0.5, 50), st.floats(1, 200), st.floats(0, 300), st.floats(0.5, 5000))
def test_device_is_exact_for_any_host_and_any_call_once_the_queue_runs(enqueue_us, flush_us, host_us, gpu_us):
    gpu = FakeGpu(enqueue_us=enqueue_us, flush_us=flush_us)
    timer, call = DeviceTimer(gpu), gpu.call(gpu_us, host_us=host_us)
    estimated_us, launch_us = timer.estimate(call).time_us, host_us + 4 * enqueue_us
    # Unblocked, the one call that is estimated from may have waited for its launch.
    assert gpu_us * (1 - 1e-6) <= estimated_us <= gpu_us * (1 + 1e-6) + (0 if timer.blocked else launch_us)
    block = timer.block(call, 10)
    assert block.times_us[not timer.blocked :] == pytest.approx([gpu_us] * (9 + timer.blocked), rel=1e-6)
    assert block.flags == ()


def test_a_whole_sampling_on_the_fake_gpu_is_exact():
    gpu, call = launch_bound()
    timing = sample(DeviceTimer(gpu), call, RULE)
    assert (timing.timer, timing.l2, timing.stop_reason, timing.flags) == ("device", "cold", "precise", ())
    assert timing.times_us == (10.0,) * 45 * 7
    assert timing.rounds == tuple(index for index in range(7) for _ in range(45))
    assert timing.notes.pop("load_s") > 0
    assert timing.notes == {"calls_per_round": 45.0, "warm_up_calls": 226.0}  # 25 ms of 10 + 20 + 81 us


def test_every_block_has_its_round_and_its_time_of_day_and_the_load_before_it_its_seconds():
    calls = [TimedCall(lambda: time.sleep(0.002)) for _ in range(2)]
    rule = replace(RULE, precision=1e-9, min_rounds=3, max_rounds=3)
    before = time.time()
    first, second = sample_rivals([Entry(CpuTimer(), call) for call in calls], rule, order=abba_order)
    assert [index for index, _, _ in first.blocks] == sorted(set(first.rounds)) == [0, 1, 2]
    moments = sorted([*first.blocks, *second.blocks], key=lambda block: block[1])
    assert all(end <= begin for (_, _, end), (_, begin, _) in itertools.pairwise(moments)), "blocks follow each other"
    for timing in (first, second):
        for index, begin, end in timing.blocks:
            inside = sum(us for us, of in zip(timing.times_us, timing.rounds, strict=True) if of == index)
            assert inside * timing.notes["calls_per_sample"] <= (end - begin) * 1e6 + 1
    # Both calls are warmed up for 25 ms before.
    assert 0.05 < first.notes["load_s"] < first.blocks[0][1] - before + 0.01
    assert before - 0.01 < first.blocks[0][1] - first.notes["load_s"] <= moments[-1][2] < time.time() + 0.01


def test_a_round_fits_into_the_launch_queue():
    gpu, call = launch_bound()
    assert sample(DeviceTimer(gpu), call, RULE, kernels=100).notes["calls_per_round"] == 8.0


@pytest.mark.parametrize(
    ("cost", "calls", "of_rivals", "warm_up"),
    [
        (Cost(1.0), 50, 50, 300),
        (Cost(1000.0), 5, 15, 25),
        (Cost(990.0, 20.0), 5, 15, 25),
        (Cost(14_000.0), 1, 1, 3),
        (Cost(15_000.0), 1, 1, 3),
        (Cost(1e6), 1, 1, 3),
        (Cost(10.0, 0.0, 40), 20, 20, 300),
        (Cost(10.0, 0.0, 5000), 1, 1, 300),
        (Cost(200.0), 25, 50, 125),
    ],
)
def test_calls_a_round_fill_5_ms_or_15_of_rivals_and_the_warm_up_25(cost, calls, of_rivals, warm_up):
    assert (cost.calls_in(ROUND_US), cost.calls_in(RIVALS_ROUND_US), cost.warm_up_calls) == (calls, of_rivals, warm_up)


WIDE, TIGHT = [100.0, 110.0] * 30, [100.0] * 60


@pytest.mark.parametrize(
    ("medians", "call_us", "elapsed_s", "reason"),
    [
        (TIGHT[:6], 10.0, 99.0, None),  # never before the least rounds, whatever the clock says
        (TIGHT[:7], 10.0, 0.0, "precise"),
        (WIDE[:7], 10.0, 0.0, None),
        (WIDE[:7], 10.0, 1.5, "budget"),
        (WIDE[:39], 10.0, 1.4, None),
        (WIDE[:40], 10.0, 1.4, "max_rounds"),
        (TIGHT[:40], 10.0, 9.9, "precise"),
        (TIGHT[:4], 60_000.0, 99.0, None),
        (TIGHT[:5], 60_000.0, 0.0, "precise"),
        (TIGHT[:5], 50_000.0, 0.0, None),
        (WIDE[:5], 60_000.0, 2.0, "budget"),
    ],
)
def test_the_rule_says_why_to_stop(medians, call_us, elapsed_s, reason):
    assert RULE.verdict([medians], call_us, elapsed_s) == reason


def test_the_rule_keeps_its_least_rounds_where_they_are_few():
    few = StoppingRule(precision=0.005, min_rounds=1, max_rounds=1, budget_s=0.0)
    assert few.least_rounds(60_000.0) == 1
    assert few.verdict([[100.0]], 10.0, 0.0) == "max_rounds"  # one round has no interval


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
    timer = Scripted(Cost(1000.0), values=lambda block: 999.0 if block <= 2 else 100.0)
    timing = sample(timer, lambda: None, RULE)
    assert timer.blocks == [15, 10] + [5] * 7
    assert timing.times_us == (100.0,) * 5 * 7


def test_samples_that_stay_noisy_end_at_the_last_round_with_all_of_them_kept():
    timer = Scripted(Cost(20_000.0), values=lambda block: 100.0 + 10 * (block % 2), flags=("unblocked",))
    timing = sample(timer, lambda: None, RULE)
    assert (timing.stop_reason, len(timing.times_us), timing.flags) == ("max_rounds", 40, ("unblocked",))
    assert timing.rounds == tuple(range(40))


def test_the_budget_ends_it_by_the_clock(monkeypatch):
    timer = Scripted(Cost(20_000.0), values=lambda block: 100.0 + 10 * (block % 2))
    # A block takes a tenth of a second. The first ones are the warm-up's.
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: 0.1 * len(timer.blocks)))
    timing = sample(timer, lambda: None, RULE)
    assert (timing.stop_reason, len(timing.times_us)) == ("budget", 15)
    assert timing.notes["load_s"] == pytest.approx(0.1 * (len(timer.blocks) - 15))
    assert [round(end - begin, 3) for _, begin, end in timing.blocks] == [0.1] * 15


def test_a_second_opinion_is_one_block():
    timer = Scripted(Cost(10.0), flags=("profiler_lossy",))
    timing = single_block(timer, lambda: None, 12)
    assert (timer.blocks, timing.times_us) == ([12], (100.0,) * 12)
    assert (timing.timer, timing.stop_reason, timing.rounds) == ("scripted", "one_block", (0,) * 12)
    assert timing.flags == ("profiler_lossy",)


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


def test_a_long_cpu_call_is_a_sample_of_its_own(monkeypatch):
    timer, call = CpuTimer(), Clock(monkeypatch, then_us=2500.0)
    assert timer.estimate(call) == Cost(2500.0)
    assert timer.block(call, 3).times_us == [2500.0] * 3
    assert call.calls == 6


def test_the_cpu_clock_stands_still_around_a_call(monkeypatch):
    timer, call = CpuTimer(), Clock(monkeypatch, then_us=2500.0)
    seen = []

    def wait() -> None:
        call.now_ns += 700_000

    def look(result) -> None:
        seen.append(result)
        wait()

    timed = TimedCall(call, wait, look)
    assert timer.estimate(timed) == Cost(2500.0, 1400.0)
    assert timer.block(timed, 3).times_us == [2500.0] * 3
    assert len(seen) == 6


@pytest.mark.parametrize("kind", [DeviceTimer, EventTimer, WallTimer])
def test_what_is_around_a_call_on_a_gpu_is_not_timed(kind):
    gpu, results = FakeGpu(), []
    run = gpu.call(100.0)
    timed = TimedCall(
        lambda: run() or "result", gpu.call(40.0), lambda result: results.append(result) or gpu.call(60.0)()
    )
    timer, plain = kind(gpu), kind(gpu)
    plain.estimate(run)
    timer.estimate(timed)
    results.clear()
    assert timer.block(timed, 4).times_us == pytest.approx(plain.block(run, 4).times_us, abs=5.0)
    assert results == ["result"] * 4


def test_timers_are_made_by_the_names_in_the_records():
    gpu = FakeGpu()
    made = [make_timer(name, gpu) for name in ("device", "event", "kernel")]
    assert [type(timer) for timer in made] == [DeviceTimer, EventTimer, KernelTimer]
    assert [timer.name for timer in made] == ["device", "event", "kernel"]
    assert isinstance(make_timer("cpu", None), CpuTimer)
    assert {timer.l2 for timer in made} == {"cold"}
    assert single_block(make_timer("device", gpu, "written"), gpu.call(100.0), 2).l2 == "written"
    assert {"write", "flush"} & {kind for kind, _ in gpu.log} == {"write"}


@pytest.mark.parametrize(("name", "gpu"), [("cpu", FakeGpu()), ("device", None), ("event", None)])
def test_a_timer_of_the_other_kind_of_device_is_refused(name, gpu):
    with pytest.raises(ValueError, match=f"timer '{name}' does not measure on a {'GPU' if gpu else 'CPU'}"):
        make_timer(name, gpu)


def test_a_timer_that_nobody_described_is_refused():
    with pytest.raises(ValueError, match="there is no timer 'nonsense'"):
        make_timer("nonsense", None)
