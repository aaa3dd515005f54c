import pytest
from fakes import make_timing

from attn_exp.core.record.flags import duty_flags, flag_marks, telemetry_flags, timing_flags

CALM = [100.0, 100.1, 99.9, 100.0, 100.1, 99.9, 100.0, 100.1, 99.9]


def test_calm_samples_carry_no_flag():
    assert timing_flags(make_timing(CALM), ()) == set()


def test_an_interval_beyond_two_percent_is_unstable():
    assert timing_flags(make_timing([100.0, 101.0]), ()) == {"unstable"}  # two rounds: +-15 %
    assert timing_flags(make_timing([100.0, 100.04]), ()) == set()


@pytest.mark.parametrize("rise", [1.012, 0.988])
def test_a_last_third_that_differs_from_the_first_is_drift(rise):
    # Unstable, too: where the next rounds would be is not known to 1 %.
    assert timing_flags(make_timing(CALM[:6] + [time * rise for time in CALM[6:]]), ()) == {"drift", "unstable"}


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


def test_a_clock_below_the_calls_highest_is_marked_and_a_stretch_with_rests_is_flagged():
    assert flag_marks(timing_flags(make_timing(CALM, flags=("below_clock",)), ())) == "c"
    assert [duty_flags(make_timing(CALM, notes=notes)) for notes in ({"duty": 0.94}, {"duty": 0.95}, {})] == [
        {"low_duty"}, set(), set()]  # fmt: skip


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
