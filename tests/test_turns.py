"""Rivals are sampled in turns of their own blocks, leave one by one, and a disturbed block is repeated."""

import math

import numpy as np
import pytest
from fakes import FakeGpu

from attn_exp.core.record.flags import duty_flags
from attn_exp.core.stats.paired import abba_order, compare_pair
from attn_exp.core.stats.summary import medians_by_round
from attn_exp.timers import card as clocks
from attn_exp.timers.card import Card
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.loop import DECIDED_ROUNDS, Block, Cost, Entry, sample_turns
from attn_exp.timers.stopping import StoppingRule

RULE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=40, budget_s=5.0)


class Simulated:
    """A timer of calls of `us` with a wrong estimate, whose blocks begin with a call that takes half as long again.

    Each block has a deviation of its own, each call another. `log` has the name of each block's rival.
    """

    name, l2, estimates = "cpu", "warm", True

    def __init__(self, us, sd=0.004, *, name="", log=None, seed=1, estimate_off=1.0):
        self.draw, self.us, self.sd, self.off = np.random.default_rng(seed), us, sd, estimate_off
        self.log, self.who, self.lengths = [] if log is None else log, name, []

    def estimate(self, call):
        return Cost(self.us * self.off)

    def block(self, call, calls):
        call()
        self.log.append(self.who)
        self.lengths.append(calls)
        times = self.us * np.exp(self.sd * (self.draw.normal() + self.draw.normal(size=calls)))
        times[0] *= 1.5
        return Block(times.tolist())


def sampled(*timers, rule=RULE, calls=None, **options):
    calls = calls or [lambda: None] * len(timers)
    return sample_turns([Entry(timer, call) for timer, call in zip(timers, calls, strict=True)], rule, **options)


def rounds_of(timing):
    return sorted(set(timing.rounds))


def test_each_rival_has_its_own_number_of_calls_and_the_first_of_a_block_is_no_sample():
    one, other = Simulated(500.0), Simulated(5_000.0)
    timings = sampled(one, other)
    assert [timing.notes["calls_per_round"] for timing in timings] == [30.0, 3.0]
    assert (one.lengths[-1], other.lengths[-1]) == (31, 4)
    for timing, timer, calls in zip(timings, (one, other), (30, 3), strict=True):
        assert max(timing.times_us) < 1.25 * timer.us
        assert len(timing.times_us) == calls * len(rounds_of(timing))


def test_a_call_that_fills_a_block_alone_is_sampled_at_once():
    timer = Simulated(60_000.0)
    (timing,) = sampled(timer)
    assert timer.lengths[-1] == 1 and len(timing.times_us) == len(rounds_of(timing))


def test_turns_are_in_the_order_of_abba_and_rounds_in_time_order():
    log = []
    rule = StoppingRule(0.0, 6, 6, 5.0)
    timings = sampled(*[Simulated(15_000.0, name=name, log=log, seed=ord(name)) for name in "abc"], rule=rule)
    turns = log[-3 * 7 :]
    assert turns == ["abc"[at] for number in range(7) for at in abba_order(3, number)]
    for timing in timings:
        assert timing.rounds == tuple(range(7))
        starts = [begin for _, begin, _ in timing.blocks]
        assert starts == sorted(starts) and [number for number, _, _ in timing.blocks] == list(range(7))


def test_the_order_is_that_of_those_who_still_stand():
    log = []
    slow, *others = [Simulated(us, 0.05, name=name, log=log, seed=ord(name))
                     for us, name in ((450_000.0, "s"), (15_000.0, "a"), (15_000.0, "b"))]  # fmt: skip
    timings = sampled(slow, *others, rule=StoppingRule(0.0, 9, 9, 50.0))
    assert [timing.stop_reason for timing in timings] == ["slow", "max_rounds", "max_rounds"]
    rest = log[-(2 * 4 + 3) :]
    assert rest[:8] == ["ab"[at] for number in range(5, 9) for at in abba_order(2, number)]


def test_a_rival_that_takes_twenty_times_as_long_leaves_after_five_rounds_and_has_the_last_one():
    timings = sampled(Simulated(1_000.0, seed=2), Simulated(21_000.0), Simulated(19_000.0))
    assert [timing.stop_reason for timing in timings][1:] == ["slow", "decided"]
    last = rounds_of(timings[0])[-1]
    assert rounds_of(timings[1]) == [0, 1, 2, 3, 4, last] and last >= 7


def test_a_rival_that_is_decided_leaves_and_the_fastest_goes_on_until_it_is_precise():
    fast, slow = sampled(Simulated(1_000.0, 0.006, seed=3), Simulated(1_500.0, 0.001))
    assert (fast.stop_reason, slow.stop_reason) == ("precise", "decided")
    assert len(rounds_of(slow)) == DECIDED_ROUNDS + 1 < len(rounds_of(fast))
    # Pairs are by the number of the round, also behind the gap.
    assert rounds_of(slow)[-1] == rounds_of(fast)[-1]


def test_a_disturbance_of_a_round_that_rivals_share_is_none_of_their_ratio():
    class Common(Simulated):
        def block(self, call, calls):
            self.lengths.append(calls)
            shared = np.random.default_rng(len(self.lengths)).normal(0, 0.02)
            return Block([self.us * math.exp(shared)] * calls)

    fast, other = sampled(Common(1_000.0), Common(1_001.0))
    assert other.stop_reason == "precise" and fast.stop_reason == "max_rounds"
    assert len(rounds_of(other)) < len(rounds_of(fast)) == 41


def test_equals_are_hardly_ever_told_apart_however_wrong_their_estimates_and_three_percent_is_found():
    """Told apart by the estimates once (1 call a round against 14), and by the first call of a block."""
    draw, told, found = np.random.default_rng(10), 0, 0
    for seed in range(100):
        off = math.exp(draw.uniform(-2.7, 2.7))
        for slower, counts in ((1.0, False), (1.03, True)):
            timings = sampled(Simulated(2_000.0, seed=seed), Simulated(2_000.0 * slower, seed=-seed % 1000 + 1000,
                                                                       estimate_off=off))  # fmt: skip
            medians = [medians_by_round(timing.times_us, timing.rounds) for timing in timings]
            verdict = compare_pair(*medians, 0.01).verdict
            told += not counts and verdict in ("faster", "slower")
            found += counts and verdict == "faster"
    assert told <= 2 and found >= 80


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_rival_that_raises_in_a_round_leaves_and_the_others_go_on(position):
    calls, failed = [0], []

    def dies():
        calls[0] += 1
        if calls[0] > 6:
            raise RuntimeError("out of luck")

    rule = StoppingRule(0.0, 9, 9, 5.0)
    timings = sampled(
        *[Simulated(15_000.0, seed=at) for at in range(3)],
        rule=rule,
        calls=[dies if at == position else lambda: None for at in range(3)],
        failed=lambda at, error, number: failed.append((at, str(error), number)),
    )
    # Three blocks of warm-up and three rounds.
    assert failed == [(position, "out of luck", 3)]
    assert [timing is None for timing in timings] == [at == position for at in range(3)]
    assert all(rounds_of(timing) == list(range(10)) for timing in timings if timing)


def test_one_that_raises_before_the_first_round_is_told_without_a_round():
    failed = []
    timings = sampled(
        Simulated(15_000.0), Simulated(15_000.0), calls=[lambda: 1 / 0, lambda: None],
        failed=lambda at, error, number: failed.append((at, number)),
    )  # fmt: skip
    assert failed == [(0, None)] and timings[0] is None and timings[1].stop_reason == "precise"


@pytest.mark.parametrize("sustained", [False, True])
def test_if_all_raise_there_is_nothing(sustained):
    failed = []
    timings = sampled(
        Simulated(15_000.0), calls=[lambda: 1 / 0], card=Card(), sustained=sustained,
        failed=lambda at, error, number: failed.append((at, number)),
    )  # fmt: skip
    assert (timings, failed) == ([None], [(0, None)])


# On a fake GPU: host and clock.


def once(gpu, call, at, host_us=50_000.0):
    """A call in which the host is slow once, in the call number `at`."""
    calls = [0]

    def run():
        calls[0] += 1
        if calls[0] == at:
            gpu.host_us += host_us
        call()

    return run


@pytest.mark.parametrize(("gpu_us", "at"), [(30.0, 400), (300.0, 200), (3_000.0, 60)])
def test_a_block_in_which_the_host_was_late_is_repeated_and_nothing_latches(gpu_us, at):
    def timed(late):
        gpu = FakeGpu(enqueue_us=1.0, flush_us=20.0)
        timers, call = [DeviceTimer(gpu), DeviceTimer(gpu)], gpu.call(gpu_us, host_us=50.0)
        calls = [once(gpu, call, at) if late else call, call]
        timings = sampled(*timers, calls=calls, rule=StoppingRule(0.0, 20, 20, 5.0))
        return timings, gpu.slept_us()

    (disturbed, held), (calm, undisturbed) = timed(True), timed(False)
    for one, other in zip(disturbed, calm, strict=True):
        assert one.rounds == other.rounds and one.times_us == pytest.approx(other.times_us, rel=1e-6)
    assert [one.flags for one in disturbed] == [(), ()]
    assert len(held) > len(undisturbed), "measured again"
    # Later blocks are held no longer than before.
    assert held[-20:] == pytest.approx(undisturbed[-20:], rel=1e-6)


HIGH = 1980.0


class Capped:
    """A GPU whose clock falls by `fall` once it has worked for `s` seconds since its last rest; rests are free."""

    def __init__(self, monkeypatch, s, fall=0.06, high=HIGH):
        self.gpu = FakeGpu(clock_mhz=self.clock)
        self.s, self.fall, self.high, self.rested_us, self.rests = s, fall, high, 0.0, []
        monkeypatch.setattr(clocks.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.rests.append(seconds)
        self.gpu.synchronize()
        self.gpu.host_us += 1e6 * seconds
        self.rested_us = self.gpu.host_us

    def clock(self, begin_us, end_us):
        return self.high * (1 - self.fall if end_us - self.rested_us > 1e6 * self.s else 1)

    def timed(self, call_us=1_000.0, rounds=20, **options):
        (timing,) = sampled(DeviceTimer(self.gpu), calls=[self.gpu.call(call_us)], card=Card(),
                            rule=StoppingRule(0.0, rounds, rounds, 60.0), **options)  # fmt: skip
        return timing


def test_blocks_below_the_highest_clock_are_kept_uncounted_and_repeated_after_a_rest(monkeypatch):
    capped = Capped(monkeypatch, 0.1)
    timing = capped.timed()
    assert timing.clocks_mhz == (HIGH,) * 21 and len(rounds_of(timing)) == 21
    assert {clock for clock, _ in timing.uncounted} == {round(0.94 * HIGH, 1)} and timing.flags == ()
    assert all(len(times) == timing.notes["calls_per_round"] for _, times in timing.uncounted)
    assert max(capped.rests) >= 0.05


def test_a_clock_that_is_never_reached_again_is_counted_after_some_tries_and_flagged(monkeypatch):
    capped = Capped(monkeypatch, math.inf)
    capped.clock = lambda begin_us, end_us: HIGH * (1.0 if end_us < 90_000 else 0.9)
    capped.gpu.clock_mhz = capped.clock
    timing = capped.timed()
    assert timing.flags == ("below_clock",)
    assert set(timing.clocks_mhz) == {HIGH, 0.9 * HIGH} and timing.uncounted == ()
    assert set(rounds_of(timing)) == set(range(21))


def test_the_highest_clock_is_the_calls_own_also_if_somebody_locked_it(monkeypatch):
    capped = Capped(monkeypatch, math.inf, high=1200.0)
    timing = capped.timed()
    assert set(timing.clocks_mhz) == {1200.0} and timing.uncounted == () and capped.rests == []


def test_a_call_that_lowers_the_clock_itself_is_one_block_after_a_rest_at_whatever_clock(monkeypatch):
    capped = Capped(monkeypatch, 0.04)
    timing = capped.timed(call_us=60_000.0, rounds=5)
    assert set(timing.clocks_mhz) == {round(0.94 * HIGH, 1)} and timing.uncounted == () and timing.flags == ()
    assert capped.rests == [clocks.LONG_REST_S] * 6


def test_a_block_whose_stamps_cannot_be_right_sets_no_highest_clock():
    card = Card(limit_mhz=HIGH)
    assert (card.sound(3_000.0), card.sound(HIGH)) == (False, True)


def under_load(gpu, *calls):
    gpu.clock_mhz = lambda begin_us, end_us: 1_700.0
    return sampled(*[DeviceTimer(gpu) for _ in calls], calls=calls, card=Card(), sustained=True)


def test_stretches_go_in_turns_at_full_duty_and_their_lead_does_not_count():
    gpu, order = FakeGpu(), []

    def named(name, us):
        call = gpu.call(us)

        def run():
            if order[-1:] != [name]:
                order.append(name)
            call()

        return run

    timings = under_load(gpu, named("a", 1_000.0), named("b", 3_000.0))
    # After the warm-up of each.
    assert order == ["a", "b", "a", "b", "a"] or order == ["a", "b", *"abba"], order
    for timing, us in zip(timings, (1_000.0, 3_000.0), strict=True):
        assert timing.times_us == pytest.approx([us] * len(timing.times_us)) and timing.stop_reason == "stretches"
        assert timing.notes["duty"] > 0.99 and duty_flags(timing) == set()
        # Two of a second.
        assert len(timing.times_us) * (us + 20.0) / 1e6 == pytest.approx(2.0, rel=0.06)
        assert rounds_of(timing) == list(range(40)), "blocks of 50 ms"
    runs = [us for kind, us in gpu.log if kind == "call"]
    assert runs.count(1_000.0) * 1_020.0 / 1e6 == pytest.approx(3.1, rel=0.06), "and a lead of half a second each"


@pytest.mark.parametrize(("late", "low"), [(1, False), (10**9, True)])
def test_a_stretch_in_which_the_gpu_rests_is_repeated_once_and_flagged(late, low):
    gpu = FakeGpu()
    call, calls = gpu.call(1_000.0), [0]

    def stalls():
        calls[0] += 1
        # In the counted part of the first stretch, or always: the host is away for 0.4 s in a second.
        if calls[0] % 1_000 == 900 and calls[0] < late * 1_500:
            gpu.host_us += 400_000.0
        call()

    (timing,) = under_load(gpu, stalls)
    assert (timing.notes["duty"] < 0.95, duty_flags(timing)) == (low, {"low_duty"} if low else set())
    assert set(np.round(timing.times_us, 6)) == {1_000.0} and rounds_of(timing) == list(range(40))
    made = sum(us == 1_000.0 and kind == "call" for kind, us in gpu.log)
    assert made * 1.02 / 1e3 == pytest.approx(6.4 if low else 4.7, rel=0.08)
