"""Rivals of a duel are sampled alike: equally many calls a round, and no first call of a block among the samples."""

import math

import numpy as np
import pytest
from fakes import FakeGpu

from attn_exp.core.stats.paired import abba_order, compare_pair
from attn_exp.core.stats.summary import round_medians
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.loop import Block, Cost, Entry, RivalFailed, sample_rivals
from attn_exp.timers.stopping import StoppingRule

# As a duel's rule; what stops it are rounds, since no time passes.
RULE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=40, budget_s=5.0)


class Simulated:
    """A timer of calls of `us` with a wrong estimate, whose blocks begin with a call that takes half as long again.

    Each block has a deviation of its own, each call another.
    """

    name, l2, estimates = "cpu", "warm", True

    def __init__(self, draw, us, *, first=1.5, estimate_off=1.0):
        self.draw, self.us, self.first, self.off = draw, us, first, estimate_off
        self.loops = max(1, math.ceil(1000 / us))
        self.lengths = []

    def estimate(self, call):
        return Cost(self.us * self.loops * self.off)

    def block(self, call, calls):
        call()
        self.lengths.append((calls, self.loops))
        times = self.us * np.exp(0.004 * self.draw.normal() + 0.01 * self.draw.normal(size=calls))
        times[0] *= 1 + (self.first - 1) / self.loops
        return Block(times.tolist())


def duel(one, other):
    timings = sample_rivals([Entry(timer, lambda: None) for timer in (one, other)], RULE, order=abba_order)
    medians = [round_medians(timing.times_us, timing.rounds) for timing in timings]
    return compare_pair(*medians, 0.01), timings


def test_two_instances_are_equal_however_wrong_their_estimates_and_three_percent_more_is_found():
    """200 duels each: told apart by the estimates before (1 call a round against 14), by the first call of a block."""
    draw = np.random.default_rng(10)
    told = found = 0
    for _ in range(200):
        off = math.exp(draw.uniform(-2.7, 2.7))
        equal, _ = duel(Simulated(draw, 2000.0), Simulated(draw, 2000.0, estimate_off=off))
        told += equal.verdict in ("faster", "slower")
        slower, _ = duel(Simulated(draw, 2000.0), Simulated(draw, 2060.0, estimate_off=off))
        found += slower.verdict == "faster"
    assert told <= 2
    assert found >= 190


def test_all_rivals_make_the_same_number_of_calls_and_each_block_begins_with_one_that_is_no_sample():
    draw = np.random.default_rng(1)
    one, other = Simulated(draw, 20.0), Simulated(draw, 900.0)
    _, timings = duel(one, other)
    # The longest has room for 16 calls in 15 ms, which are one sample.
    assert {one.loops, other.loops} == {16}
    assert one.lengths[-1] == other.lengths[-1] == (2, 16)
    assert [timing.notes["calls_per_round"] for timing in timings] == [1.0, 1.0]
    assert all(len(timing.times_us) == len(set(timing.rounds)) for timing in timings)
    # What the first call of a block costs is in no sample.
    assert max(timings[0].times_us) < 20 * 1.25


def test_on_a_gpu_too(monkeypatch):
    gpu = FakeGpu()
    entries = [Entry(DeviceTimer(gpu), gpu.call(us)) for us in (100.0, 1000.0)]
    before = len([kind for kind, _ in gpu.log if kind == "call"])
    timings = sample_rivals(entries, RULE, order=abba_order)
    assert [timing.notes["calls_per_round"] for timing in timings] == [15.0, 15.0]
    assert len([kind for kind, _ in gpu.log if kind == "call"]) - before > 2 * 16 * 7
    assert [len(timing.times_us) / len(set(timing.rounds)) for timing in timings] == [15.0, 15.0]


@pytest.mark.parametrize("position", [0, 1])
def test_a_rival_that_dies_in_a_round_is_named(position):
    draw, calls = np.random.default_rng(3), [0]

    def dies():
        calls[0] += 1
        if calls[0] > 30:
            raise RuntimeError("out of luck")

    entries = [Entry(Simulated(draw, 5000.0), dies if at == position else lambda: None) for at in range(2)]
    with pytest.raises(RivalFailed, match="out of luck") as failed:
        sample_rivals(entries, StoppingRule(0.0, 40, 40, 5.0), order=abba_order)
    assert (failed.value.position, failed.value.round > 1) == (position, True)
