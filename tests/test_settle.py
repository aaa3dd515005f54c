"""A GPU whose power limit holds it back: what is sampled is its sustained time, whatever it did before.

The fake GPU is the H200 of results/h200/doctor/power_cap.csv: the times of one call by the seconds under load, and
from 1.4 s on its swings of two seconds, again and again.
"""

import csv
import itertools
import statistics
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import FakeGpu

from attn_exp.timers import loop, settle
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.loop import Entry, sample, sample_rivals
from attn_exp.timers.settle import Settling
from attn_exp.timers.stopping import StoppingRule

RESULTS = Path(__file__).resolve().parent.parent / "results" / "h200" / "doctor" / "power_cap.csv"
with RESULTS.open() as file:
    CURVE = [(float(row["seconds"]), float(row["time_us"])) for row in csv.DictReader(file)]
RESTED_US, SETTLED_S, SWINGS_S = 6215.0, 1.4, 2.0
SWINGS = [time_us for seconds, time_us in CURVE if SETTLED_S <= seconds < SETTLED_S + SWINGS_S]
SUSTAINED_US = statistics.median(SWINGS)
RULE = StoppingRule(0.005, 7, 40, 0.1)
# A light call's time, and the share of a processor's clock that the power limit leaves.
LIGHT_US, HIGHEST_MHZ = 300.0, 1980.0


@dataclass
class CappedGpu(FakeGpu):
    """Calls of `RESTED_US` and more are heavy: they become slower the longer the GPU is under their load.

    Other work and rest let it recover, within a tenth of a second.
    """

    under_load_s: float = 0.0
    # Seconds of all heavy calls: at which place of its swings the clock is.
    heavy_s: float = 0.0
    # Whether the power suffices for any load.
    enough: bool = False

    @property
    def slower(self) -> float:
        """The factor on a heavy call's time."""
        if self.enough:
            return 1.0
        if self.under_load_s >= SETTLED_S:
            return SWINGS[int(self.heavy_s % SWINGS_S / SWINGS_S * len(SWINGS))] / RESTED_US
        times = [seconds for seconds, _ in CURVE]
        return max(1.0, CURVE[max(0, bisect(times, self.under_load_s) - 1)][1] / RESTED_US)

    def _put(self, kind: str, gpu_us: float) -> None:
        idle_us = max(0.0, self.host_us - self.queue_free_us)
        heavy = kind == "call" and gpu_us >= RESTED_US
        if heavy:
            gpu_us *= self.slower
            self.under_load_s += gpu_us / 1e6
            self.heavy_s += gpu_us / 1e6
        recovering_us = max(0.0, idle_us - 5e3) + (gpu_us if kind == "call" and not heavy else 0.0)
        self.under_load_s = max(0.0, min(SETTLED_S, self.under_load_s) - recovering_us / 1e6 * 14)
        super()._put(kind, gpu_us)

    def reading(self) -> list[dict[str, object]]:
        return [{"sm_clock_mhz": HIGHEST_MHZ / self.slower}]


@pytest.fixture
def gpu(monkeypatch):
    made = CappedGpu()
    clock = SimpleNamespace(perf_counter=lambda: made.host_us / 1e6, sleep=lambda s: rest(made, s))
    for module in (loop, settle):
        monkeypatch.setattr(module, "time", clock)
    return made


def rest(gpu, seconds):
    gpu.synchronize()
    gpu.host_us += 1e6 * seconds


def load(gpu, seconds, call_us=RESTED_US):
    since = gpu.host_us
    while gpu.host_us - since < 1e6 * seconds:
        gpu.call(call_us)()
        gpu.synchronize()


def timed(gpu, call_us=RESTED_US, limit_s=3.0, rule=RULE):
    heavy = call_us >= RESTED_US
    settling = Settling(limit_s, heavy, gpu.reading, HIGHEST_MHZ)
    return sample(DeviceTimer(gpu), gpu.call(call_us), rule, settle=lambda load, costs: settling.settle(load))


BEFORE = {
    "a rest": lambda gpu: rest(gpu, 2.0),
    "a minute of compiling": lambda gpu: rest(gpu, 60.0),
    "a second of load": lambda gpu: load(gpu, 1.0),
    "a minute of load": lambda gpu: load(gpu, 60.0),
    "a light job": lambda gpu: timed(gpu, LIGHT_US),
    "a heavy job": lambda gpu: timed(gpu, 2 * RESTED_US),
    "load and a rest": lambda gpu: (load(gpu, 3.0), rest(gpu, 0.3)),
    "half a second of load": lambda gpu: load(gpu, 0.5),
}


@pytest.mark.parametrize("before", BEFORE)
def test_what_was_before_does_not_move_a_sustained_time(gpu, before):
    BEFORE[before](gpu)
    timing = timed(gpu)
    assert statistics.median(timing.times_us) == pytest.approx(SUSTAINED_US, rel=0.002)
    assert (timing.flags, timing.stop_reason) == ((), "budget")
    assert SWINGS_S <= timing.blocks[-1][2] - timing.blocks[0][1] <= SWINGS_S + 0.1


def test_where_the_limit_does_not_hold_a_heavy_call_back_it_is_precise_at_once(gpu):
    gpu.enough = True
    rest(gpu, 2.0)
    timing = timed(gpu)
    assert statistics.median(timing.times_us) == pytest.approx(RESTED_US)
    assert (timing.flags, timing.stop_reason) == ((), "precise")
    assert timing.blocks[-1][2] - timing.blocks[0][1] < 0.2


def test_without_time_to_settle_it_is_the_rested_time_and_says_so(gpu):
    rest(gpu, 2.0)
    timing = timed(gpu, limit_s=0.0)
    assert statistics.median(timing.times_us) == pytest.approx(RESTED_US, rel=0.01)
    assert (timing.flags, timing.stop_reason) == (("unsettled",), "budget")


def test_load_shortly_before_counts(gpu):
    spent = {}
    for name in ("a rest", "a minute of load"):
        BEFORE[name](gpu)
        spent[name] = timed(gpu).notes["load_s"]
    assert spent["a minute of load"] < 1.4 < 1.5 < spent["a rest"] < 2.2


@pytest.mark.parametrize("before", ["a rest", "a light job"])
def test_a_light_call_at_the_highest_clock_waits_for_nothing(gpu, before):
    BEFORE[before](gpu)
    began = gpu.host_us
    timing = timed(gpu, LIGHT_US)
    with_settling = gpu.host_us - began
    began = gpu.host_us
    sample(DeviceTimer(gpu), gpu.call(LIGHT_US), RULE)
    assert with_settling == pytest.approx(gpu.host_us - began)
    assert timing.flags == ()


def test_a_light_call_after_a_heavy_one_waits_for_the_clock(gpu):
    load(gpu, 5.0)
    assert gpu.reading()[0]["sm_clock_mhz"] < 0.9 * HIGHEST_MHZ
    assert timed(gpu, LIGHT_US).flags == ()
    assert gpu.reading()[0]["sm_clock_mhz"] > 0.97 * HIGHEST_MHZ


def test_a_clock_that_is_locked_low_is_settled(gpu):
    locked = Settling(3.0, heavy=False, read=lambda: [{"sm_clock_mhz": 1000.0}], highest_mhz=HIGHEST_MHZ)
    began = gpu.host_us
    assert locked.settle(lambda seconds: load(gpu, seconds, LIGHT_US) or LIGHT_US) == 0.0
    assert 0.1 <= (gpu.host_us - began) / 1e6 <= 0.2


@pytest.mark.parametrize("heavy", [True, False])
def test_a_gpu_that_never_settles_is_given_up_in_time(gpu, heavy):
    clocks = itertools.cycle([1000.0, 1500.0])
    restless = Settling(3.0, heavy, lambda: [{"sm_clock_mhz": next(clocks)}], HIGHEST_MHZ)
    times = itertools.count(1000, 100)
    began = gpu.host_us
    assert restless.settle(lambda seconds: load(gpu, seconds) or float(next(times))) is None
    assert 3.0 <= (gpu.host_us - began) / 1e6 <= 3.2


def test_rivals_settle_together(gpu):
    settling = Settling(3.0, heavy=True, read=gpu.reading, highest_mhz=HIGHEST_MHZ)
    entries = [Entry(DeviceTimer(gpu), gpu.call(us)) for us in (RESTED_US, 2 * RESTED_US)]
    rest(gpu, 2.0)
    one, other = sample_rivals(entries, RULE, settle=lambda load, costs: settling.settle(load))
    # They swing together; for their ratio, no whole swing is waited for.
    assert statistics.median(one.times_us) > 1.1 * RESTED_US
    assert statistics.median(other.times_us) / statistics.median(one.times_us) == pytest.approx(2.0, rel=0.03)
    assert one.blocks[-1][2] - one.blocks[0][1] < 0.5 * SWINGS_S
