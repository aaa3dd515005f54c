import subprocess
import sys
import time

import numpy as np
import pytest
from fakes import make_timing

from attn_exp.core.flags import (
    FLAGS,
    clock_of,
    clocks_differ,
    host_reading,
    others_cores,
    telemetry_flags,
    timing_flags,
)
from attn_exp.core.window import Window

CALM = [100.0, 100.1, 99.9, 100.0, 100.1, 99.9, 100.0, 100.1, 99.9]


def test_calm_samples_carry_no_flag():
    assert timing_flags(make_timing(CALM), ()) == set()


def test_an_interval_beyond_two_percent_is_unstable():
    assert timing_flags(make_timing([100.0, 101.0]), ()) == {"unstable"}  # two rounds: +-15 %
    assert timing_flags(make_timing([100.0, 100.04]), ()) == set()


def test_many_rounds_are_stable_although_each_of_them_is_not():
    assert timing_flags(make_timing([103.0, 97.0] * 60), ()) == set()
    assert timing_flags(make_timing([103.0, 97.0] * 3), ()) == {"unstable"}


def test_a_wild_sample_inside_a_round_is_not_instability_of_rounds():
    times = np.full(90, 100.0)
    times[::10] = 500.0
    assert timing_flags(make_timing(times.tolist(), rounds=np.repeat(np.arange(9), 10).tolist()), ()) == set()


@pytest.mark.parametrize("rise", [1.012, 0.988])
def test_a_last_third_that_differs_from_the_first_is_drift(rise):
    # Unstable, too: where the next rounds would be is not known to 1 %.
    assert timing_flags(make_timing(CALM[:6] + [time * rise for time in CALM[6:]]), ()) == {"drift", "unstable"}


def test_two_rounds_cannot_drift():
    assert "drift" not in timing_flags(make_timing([100.0, 150.0]), ())


def test_short_calls_are_flagged_on_a_gpu_alone():
    short = [time / 11 for time in CALM]
    assert timing_flags(make_timing(short), ()) == {"too_short"}
    assert timing_flags(make_timing(short, timer="cpu"), ()) == set()


def test_events_that_see_more_than_the_device_mean_launch_bound():
    def seen(event_us, timer="event"):
        return timing_flags(make_timing(CALM), (make_timing([event_us], timer=timer),))

    assert seen(106.0) == {"launch_bound"}
    assert seen(104.0) == set()
    assert seen(106.0, timer="kernel") == set()


def test_the_timers_own_flags_are_kept():
    other = make_timing([90.0], timer="kernel", flags=("profiler_lossy",))
    assert timing_flags(make_timing(CALM, flags=("unblocked",)), (other,)) == {"unblocked", "profiler_lossy"}


@pytest.mark.parametrize(("cause", "flag"), [("power", "power_capped"), ("thermal", "thermal")])
def test_time_held_back_counts_if_it_grew_between_first_and_last_reading(cause, flag):
    def found(*counters):
        return telemetry_flags([{"held_back_ns": {cause: counter}} for counter in counters], None)

    assert found(5, 5, 6) == {flag}
    assert found(5, 5) == set()
    assert found(5) == set()
    assert found() == set()
    readings = [{"held_back_ns": {cause: 1}}, {}, {"held_back_ns": {cause: 2}}]
    assert telemetry_flags(readings, None) == {flag}


@pytest.mark.parametrize("reason", ["sw_thermal", "hw_thermal", "hw_slowdown"])
def test_a_thermal_reason_in_any_reading_is_thermal(reason):
    assert telemetry_flags([{"reasons": []}, {"reasons": ["idle", reason]}, {}], None) == {"thermal"}


def test_other_reasons_are_not_thermal():
    assert telemetry_flags([{"reasons": ["idle", "sw_power_cap"]}], None) == set()


def test_a_clock_far_below_the_highest_is_low():
    assert telemetry_flags([{"sm_clock_mhz": 1980}, {"sm_clock_mhz": 1484}], 1980) == {"clock_low"}
    assert telemetry_flags([{"sm_clock_mhz": 1486}], 1980) == set()
    assert telemetry_flags([{"sm_clock_mhz": 300}], None) == set()


def test_another_process_on_the_gpu_is_told():
    assert telemetry_flags([{"processes": 1}, {"processes": 2}], None) == {"shared_gpu"}
    assert telemetry_flags([{"processes": 1}, {}], None) == set()


def test_others_on_the_processors_are_told_and_ones_own_work_is_not():
    def found(busy_s, own_s):
        return telemetry_flags(
            [{"at": 0.0, "busy_s": 0.0, "own_s": 0.0}, {}, {"at": 2.0, "busy_s": busy_s, "own_s": own_s}], None
        )

    assert found(4.0, 3.6) == {"busy_host"}
    assert found(4.0, 3.9) == set()
    assert telemetry_flags([{"at": 0.0, "busy_s": 0.0, "own_s": 0.0}], None) == set()


def test_a_program_that_spins_beside_is_seen_and_this_one_is_not():
    first = host_reading()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    alone = others_cores(first, host_reading())
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        time.sleep(0.2)
        first = host_reading()
        time.sleep(0.5)
        beside = others_cores(first, host_reading())
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert beside > 0.5
    assert alone < beside


def test_every_flag_has_a_mark_of_its_own_and_a_sentence():
    marks = [mark for mark, _ in FLAGS.values()]
    assert len(set(marks)) == len(marks)
    assert all(len(mark) == 1 and sentence for mark, sentence in FLAGS.values())


def test_too_short_is_also_what_this_gpus_events_resolve_in_few_steps():
    twenty = make_timing([value / 5 for value in CALM])
    assert timing_flags(twenty, (), 0.032) == set()
    assert timing_flags(twenty, (), 0.5) == {"too_short"}


def test_a_rivals_clock_is_that_of_its_blocks_else_the_median_of_what_was_read_between_them():
    between = [{"sm_clock_mhz": clock} for clock in (1980.0, 1200.0, 1980.0)]
    assert clock_of(Window(clock_mhz=1500.0), between) == 1500.0
    assert clock_of(Window(note="no answer"), between) == clock_of(None, between) == 1980.0
    assert clock_of(None, []) is None


def test_clocks_of_rivals_differ_by_more_than_one_percent():
    assert not clocks_differ([1980.0, 1970.0, None])
    assert clocks_differ([1980.0, None, 1950.0])
    assert not clocks_differ([None, 1980.0])
