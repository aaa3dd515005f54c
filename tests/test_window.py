"""Clock, power and energy while blocks ran: arithmetic on readings."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.core.host.energy import Reading
from attn_exp.core.record.flags import window_flags
from attn_exp.core.record.window import window_of

LIMITS = {"max_sm_clock_mhz": 1980, "power_limit_w": 700.0}
POWER_W, STEP_S = 650.0, 0.02


def readings(until=1.2, *, step_s=STEP_S, every=0.005, power=lambda at: POWER_W, clock=lambda at: 1700.0, reasons=()):
    """What a reader sees every few milliseconds of a counter that moves in steps."""
    found, joules, counted, at = [], 0.0, 0.0, 0.0
    while at < until:
        if at // step_s * step_s > counted:
            joules, counted = joules + power(counted) * (at // step_s * step_s - counted), at // step_s * step_s
        found.append(Reading(at=at, clock_mhz=clock(at), energy_j=1e6 + joules, energy_at=at, reasons=reasons))
        at += every
    return found


def window(blocks=((0.1, 1.1),), seen=None, call_s=0.9, **options):
    seen = readings() if seen is None else seen
    return window_of("nvml", blocks, call_s, seen, **{"watched": (0.0, 1.2), "limits": LIMITS} | options)


def test_the_mean_power_is_the_counters_between_its_first_and_last_step():
    found = window()
    assert found.power_w == pytest.approx(POWER_W, rel=0.01)
    assert (found.energy_from, found.lost, found.note) == ("counter", False, "")
    assert found.energy_s == pytest.approx(1.0, abs=0.02)
    assert found.energy_j == pytest.approx(found.power_w * found.energy_s, rel=1e-4)
    assert found.power_error == pytest.approx(0.005, rel=0.1)
    assert (found.seconds, found.call_share, found.clock_mhz) == (1.0, 0.9, 1700.0)


@given(begin=st.floats(0.05, 0.3), length=st.floats(0.25, 0.8), step_s=st.floats(0.01, 0.08))
def test_even_power_is_found_within_its_own_bound_wherever_the_blocks_lie(begin, length, step_s):
    found = window([(begin, begin + length)], readings(step_s=step_s))
    assert found.energy_from == "counter"
    assert abs(found.power_w / POWER_W - 1) <= found.power_error + 1e-3


def test_only_the_blocks_power_counts():
    blocks = [(0.1, 0.4), (0.7, 1.1)]
    inside = lambda at: any(begin - 0.01 <= at < end for begin, end in blocks)  # noqa: E731
    found = window(blocks, readings(power=lambda at: 700.0 if inside(at) else 100.0))
    assert found.power_w == pytest.approx(700.0, rel=0.06)


@pytest.mark.parametrize(
    ("blocks", "options", "words"),
    [
        ([(0.1, 0.13)], {}, "the energy counter moves every 0.02 s, and the load lasts for 0.03 s of these"),
        ([(0.1, 0.15)], {"step_s": 0.01}, "0.05 s of load are too short for a counter that is read to 10% of them"),
        ([(0.1 * n, 0.1 * n + 0.015) for n in range(1, 11)], {}, "the load lasts for 0.015 s of these"),  # bursts
        ([(0.1, 1.1)], {"step_s": 0.5}, "the energy counter moved 2 times, which is too few"),
        ([(0.1, 1.1)], {"step_s": 9.0}, "the energy counter moved 0 times, which is too few"),
    ],
)
def test_a_load_that_is_too_short_for_the_counter_has_no_power_and_says_why(blocks, options, words):
    found = window(blocks, readings(**options))
    assert (found.power_w, found.energy_j, found.energy_from, found.lost) == (None, None, "", False)
    assert words in found.note
    assert found.clock_mhz == 1700.0


def test_a_gap_in_which_the_host_computes_splits_no_load_and_a_rivals_blocks_do():
    blocks = [(at, at + 0.005) for at in (0.1 + 0.01 * n for n in range(100))]
    alone, rivals = window(blocks), window(blocks, alone=False)
    assert (alone.energy_from, alone.seconds) == ("counter", 0.5)
    assert alone.energy_s == pytest.approx(0.98, abs=0.03)
    assert (rivals.energy_from, rivals.clock_mhz) == ("", 1700.0)
    assert "the load lasts for 0.005 s of these" in rivals.note


def test_without_a_counter_sampled_power_is_the_second_choice_and_too_few_samples_are_none():
    powers = [600.0, 610.0, 620.0, 630.0]
    seen = [Reading(at=0.2 * n + 0.1, power_w=power) for n, power in enumerate(powers)]
    found = window([(0.05, 0.8)], seen, watched=(0.0, 0.8))
    assert (found.energy_from, found.power_w, found.energy_s) == ("sampled", 615.0, 0.75)
    assert found.power_error == pytest.approx(2 * 12.91 / 2 / 615, rel=1e-3)
    none = window([(0.05, 0.4)], seen, watched=(0.0, 0.8))
    assert (none.power_w, none.energy_from, none.note) == (None, "", "the device shows no energy")


def spoiled(how):
    seen = readings()
    if how == "back":
        return [replace(one, energy_j=one.energy_j - 500.0) if one.at > 0.6 else one for one in seen]
    if how == "jump":
        return [replace(one, energy_j=one.energy_j + 5000.0) if one.at > 0.6 else one for one in seen]
    if how == "clock":
        return [replace(one, clock_mhz=9e5) if 0.6 < one.at < 0.62 else one for one in seen]
    if how == "power":
        return [Reading(at=one.at, power_w=5e6) for one in seen]
    return [one for one in seen if not 0.5 < one.at < 0.9]


@pytest.mark.parametrize(
    ("how", "words", "has_power"),
    [
        ("back", "the energy counter went back", False),
        ("jump", r"the energy counter jumped by 5,0\d\d J in 0.005 s", False),
        ("clock", "a clock of 900000 MHz is impossible", True),
        ("power", r"a power of 5e\+06 W is impossible", False),
        ("silent", "no answer for 0.41 s, from 0.50 s after the first call on", True),
    ],
)
def test_telemetry_that_stops_or_jumps_is_flagged_with_its_words(how, words, has_power):
    found = window(seen=spoiled(how))
    assert found.lost
    assert window_flags(found, 1980) == {"telemetry_lost"}
    assert re.search(words, found.note), found.note
    assert (found.power_w is not None) is has_power
    assert found.clock_mhz in (1700.0, None), "an impossible clock is in no figure"


def test_no_reading_in_a_short_pass_is_no_loss_and_says_so_and_in_a_long_one_it_is():
    short = window([(0.1, 0.11)], [], watched=(0.0, 0.12))
    assert (short.lost, short.readings, short.clock_mhz) == (False, 0, None)
    assert short.note == "no reading fell into the pass's 0.01 s"
    assert window_flags(short, 1980) == set()
    assert window(seen=[]).lost


def test_a_throttle_amid_the_window_is_flagged():
    hot = [replace(one, reasons=("sw_thermal",)) if 0.5 < one.at < 0.6 else one for one in readings()]
    found = window(seen=hot)
    assert 0.05 < found.reasons["sw_thermal"] < 0.15
    assert window_flags(found, 1980) == {"thermal"}
    capped = window(seen=readings(reasons=("sw_power_cap",)))
    assert (capped.reasons, window_flags(capped, 1980)) == ({"sw_power_cap": 1.0}, {"power_capped"})
    # What happened before the blocks is not of the pass.
    before = [replace(one, reasons=("hw_thermal",)) if one.at < 0.09 else one for one in readings()]
    assert window_flags(window(seen=before), 1980) == set()


@pytest.mark.parametrize(
    ("clocks", "flags"),
    [
        (lambda at: 1700.0 + 60.0 * (at > 0.5), set()),  # 3.5 %, as under a power cap
        (lambda at: 1980.0 if 0.5 < at < 0.52 else 1700.0, {"clock_jump"}),
        (lambda at: 1980.0 if int(at / 0.1) % 2 else 1500.0, {"clock_jump"}),
        (lambda at: 1400.0, {"clock_low"}),
        (lambda at: 345.0 if at < 0.09 else 1980.0, set()),  # idle before the blocks
    ],
)
def test_a_clock_that_jumps_between_blocks_is_flagged(clocks, flags):
    assert window_flags(window(seen=readings(clock=clocks)), 1980) == flags
