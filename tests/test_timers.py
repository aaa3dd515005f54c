from dataclasses import replace
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
from attn_exp.timers.loop import (
    RIVALS_ROUND_US,
    Block,
    Cost,
    Entry,
    sample,
    sample_entry,
)
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


def test_device_blocks_the_stream_when_enqueueing_is_slower_and_for_as_long_as_it_takes():
    gpu, call = launch_bound()
    timer = DeviceTimer(gpu)
    cost = timer.estimate(call)
    assert timer.blocked
    assert (cost.time_us, cost.around_us) == (10.0, 20.0), "what the GPU does, whatever the host takes"
    gpu.log.clear()
    assert timer.block(call, 8).flags == ()
    assert gpu.slept_us() == [1.5 * 54 * 8]
    assert [kind for kind, _ in gpu.log] == ["sleep", "event"] + ["flush", "event", "call", "event"] * 8


def test_nothing_but_the_flush_lies_between_two_timed_calls_of_a_block():
    gpu, seen = FakeGpu(enqueue_us=1.0, flush_us=20.0), []
    call = gpu.call(500.0)
    timer = DeviceTimer(gpu)

    def before(number):
        gpu._put("change", 5.0)

    def after(number, last):
        gpu._put("copy", 5.0)
        seen.append(number)

    rule = replace(RULE, min_rounds=8, max_rounds=8)
    sample_entry(Entry(timer, call, before_block=before, after_block=after), rule)
    log = [kind for kind, _ in gpu.log]
    blocks = "".join(
        {"flush": "f", "event": "e", "call": "c", "change": "(", "copy": ")", "sleep": "s"}[k] for k in log
    )
    # Before a block whose queue is empty there may be a sleep.
    inside = [part.partition(")")[0].removeprefix("se") for part in blocks.split("(")[1:]]
    assert len(inside) == len(seen) >= 8
    assert all(part == "fece" * (len(part) // 4) for part in inside), inside[0]


def test_the_next_block_is_enqueued_while_one_runs():
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    timing = sample(DeviceTimer(gpu), gpu.call(5_000.0, host_us=50.0), RULE)
    # From its first call to its last the GPU never waits for the host.
    run = gpu.log[-4 * len(timing.times_us) :]
    assert [kind for kind, _ in run] == ["flush", "event", "call", "event"] * len(timing.times_us)
    assert set(timing.times_us) == {5_000.0} and timing.notes["duty"] > 0.99


@pytest.mark.parametrize(("gpu_us", "blocked"), [(40.0, True), (50.0, False), (1000.0, False)])
def test_device_does_not_block_when_the_gpu_is_slower_than_the_host(gpu_us, blocked):
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    timer, call = DeviceTimer(gpu), gpu.call(gpu_us, host_us=50.0)
    cost = timer.estimate(call)
    assert timer.blocked is blocked  # 1.2 * 54 = 65 against gpu_us + 20
    assert cost.time_us == pytest.approx(gpu_us, rel=0.05)
    block = timer.block(call, 5)
    assert block.times_us == [gpu_us] * 5
    assert block.flags == ()


def slower_from_now(gpu, call, host_us):
    def run():
        gpu.host_us += host_us
        call()

    return run


def test_blocks_are_held_from_where_the_host_falls_behind():
    gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
    timer, call = DeviceTimer(gpu), gpu.call(50.0, host_us=50.0)
    timer.estimate(call)
    assert not timer.blocked
    # Another program takes the host's time from now on.
    slower = slower_from_now(gpu, call, 100.0)
    assert timer.enqueue(slower, 8)[1]().times_us == [50.0] * 8
    assert timer.blocked


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
    assert timing.times_us == (10.0,) * 35 * 7, "200 samples at least"
    assert timing.rounds == tuple(index for index in range(7) for _ in range(35))
    assert timing.notes["load_s"] > 0 and 0 < timing.notes["duty"] <= 1
    assert {"calls_per_round": 35.0, "warm_up_calls": 150.0, "flush_us": 20.0}.items() <= timing.notes.items()


@pytest.mark.parametrize(
    ("cost", "of_rivals", "warm_up"),
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
def test_a_round_of_rivals_and_the_warm_up_take_15_ms(cost, of_rivals, warm_up):
    assert (cost.calls_in(RIVALS_ROUND_US), cost.warm_up_calls) == (of_rivals, warm_up)


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
        (TIGHT[:4], 60_000.0, 99.0, None),  # as many rounds as take 0.1 s, but five
        (TIGHT[:5], 20_000.0, 0.0, "precise"),
        (TIGHT[:5], 16_000.0, 0.0, None),
        (WIDE[:5], 60_000.0, 2.0, "budget"),
    ],
)
def test_the_rule_says_why_to_stop(medians, call_us, elapsed_s, reason):
    assert RULE.verdict([medians], call_us, elapsed_s) == reason


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
    assert timer.blocks == [15] + [4] * 7
    assert timing.times_us == (100.0,) * 4 * 7


def test_samples_that_stay_noisy_end_at_the_last_round_with_all_of_them_kept():
    timer = Scripted(Cost(14_000.0), values=lambda block: 100.0 + 10 * (block % 2), flags=("unblocked",))
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
