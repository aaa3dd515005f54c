"""A GPU whose power limit holds it back: what is sampled is its sustained time, or that of a burst after a rest.

The fake GPU is the H200 of results/h200/doctor/power_cap.csv: the times of one call by the seconds under load, and
from 1.4 s on its swings, again and again.
"""

import csv
import statistics
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import FakeGpu

from attn_exp.timers import loop, pace
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.loop import Entry, sample, sample_rivals
from attn_exp.timers.pace import BURST_S, SWING_S, Pace, settled
from attn_exp.timers.stopping import StoppingRule

RESULTS = Path(__file__).resolve().parent.parent / "results" / "h200" / "doctor" / "power_cap.csv"
with RESULTS.open() as file:
    CURVE = [(float(row["seconds"]), float(row["time_us"])) for row in csv.DictReader(file)]
RESTED_US, SETTLED_S, SWINGS_S = 6215.0, 1.4, 2.0
SWINGS = [time_us for seconds, time_us in CURVE if SETTLED_S <= seconds < SETTLED_S + SWINGS_S]
SUSTAINED_US = statistics.median(SWINGS)
RULE = StoppingRule(0.005, 24, 80, 0.1, patience_s=5.0)


@dataclass
class CappedGpu(FakeGpu):
    """Calls of `RESTED_US` and more become slower the longer the GPU is under their load; in a rest it recovers."""

    under_load_s: float = 0.0
    # Seconds of all calls: at which place of its swings the clock is.
    heavy_s: float = 0.0

    def _put(self, kind: str, gpu_us: float) -> None:
        idle_us = max(0.0, self.host_us - self.queue_free_us)
        if kind == "call":
            gpu_us *= self.slower
            self.under_load_s += gpu_us / 1e6
            self.heavy_s += gpu_us / 1e6
        self.under_load_s = max(0.0, min(SETTLED_S, self.under_load_s) - max(0.0, idle_us - 5e3) / 1e6 * 14)
        super()._put(kind, gpu_us)

    @property
    def slower(self) -> float:
        if self.under_load_s >= SETTLED_S:
            return SWINGS[int(self.heavy_s % SWINGS_S / SWINGS_S * len(SWINGS))] / RESTED_US
        times = [seconds for seconds, _ in CURVE]
        return max(1.0, CURVE[max(0, bisect(times, self.under_load_s) - 1)][1] / RESTED_US)


@pytest.fixture
def gpu(monkeypatch):
    made = CappedGpu()
    clock = SimpleNamespace(perf_counter=lambda: made.host_us / 1e6, sleep=lambda s: rest(made, s))
    for module in (loop, pace):
        monkeypatch.setattr(module, "time", clock)
    return made


def rest(gpu, seconds):
    gpu.synchronize()
    gpu.host_us += 1e6 * seconds


def load(gpu, seconds):
    since = gpu.host_us
    while gpu.host_us - since < 1e6 * seconds:
        gpu.call(RESTED_US)()
        gpu.synchronize()


def sustained(gpu, *, was_loaded=False, draws=1.0, limit_s=3.0):
    return sample(
        DeviceTimer(gpu),
        gpu.call(RESTED_US),
        RULE,
        pace=lambda load, costs: settled(load, limit_s, was_loaded=was_loaded, draws=lambda: draws),
    )


@pytest.mark.parametrize(
    ("before", "was_loaded"),
    [(lambda gpu: rest(gpu, 60.0), False), (lambda gpu: load(gpu, 0.5), False), (lambda gpu: load(gpu, 5.0), True)],
)
def test_what_was_before_does_not_move_a_sustained_time(gpu, before, was_loaded):
    before(gpu)
    timing = sustained(gpu, was_loaded=was_loaded)
    assert statistics.median(timing.times_us) == pytest.approx(SUSTAINED_US, rel=0.02)
    assert timing.flags == ()
    assert SWING_S <= timing.blocks[-1][2] - timing.blocks[0][1] <= SWING_S + 0.1
    assert timing.notes["duty"] > 0.99


def test_a_call_that_draws_less_than_the_limit_is_sampled_at_once(gpu):
    loads = []
    found = settled(lambda seconds: loads.append(seconds) or 1.0, 3.0, was_loaded=False, draws=lambda: 0.5)
    assert found == Pace() and sum(loads) < 0.3


def test_a_gpu_that_never_settles_is_given_up_in_time_and_flagged(gpu):
    times = iter(range(1000, 10**6, 100))
    assert settled(
        lambda seconds: load(gpu, seconds) or float(next(times)), 3.0, was_loaded=False, draws=lambda: None
    ) == Pace(settled=False)
    assert 3.0 <= gpu.host_us / 1e6 <= 3.2
    timing = sample(DeviceTimer(gpu), gpu.call(RESTED_US), RULE, pace=lambda load, costs: Pace(settled=False))
    assert "unsettled" in timing.flags and timing.stop_reason != "precise"


def test_a_burst_is_the_time_after_a_rest(gpu):
    load(gpu, 5.0)
    timing = sample(
        DeviceTimer(gpu), gpu.call(RESTED_US), RULE, pace=lambda load, costs: Pace(rest_s=0.3, burst_s=BURST_S)
    )
    assert statistics.median(timing.times_us) == pytest.approx(RESTED_US, rel=0.01)


def test_rivals_settle_together(gpu):
    entries = [Entry(DeviceTimer(gpu), gpu.call(us)) for us in (RESTED_US, 2 * RESTED_US)]
    one, other = sample_rivals(
        entries, RULE, pace=lambda load, costs: settled(load, 3.0, was_loaded=False, draws=lambda: 1.0)
    )
    # They swing together; for their ratio, no whole swing is waited for.
    assert statistics.median(one.times_us) > 1.1 * RESTED_US
    assert statistics.median(other.times_us) / statistics.median(one.times_us) == pytest.approx(2.0, rel=0.03)
