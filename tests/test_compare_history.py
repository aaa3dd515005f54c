"""Trends over sweeps: changes of level are found, equal things are left alone, and what coincides is named."""

import math
import random

import pytest
import sweeps

from attn_exp import compare
from attn_exp.comparison.history import first_shift, shifts
from attn_exp.core.errors import UserError

DELTA = math.log(1.01)


def series(length, sigma, seed, steps=()):
    """Logarithms around levels that change by `log` from index `at` on."""
    draw = random.Random(seed)
    return [draw.gauss(0, sigma) + sum(log for at, log in steps if index >= at) for index in range(length)]


@pytest.mark.parametrize("length", [8, 12, 30])
def test_series_without_a_change_are_left_alone(length):
    """Without the smallest effect that counts, so that the test's own error rate shows: at most 5 %."""
    found = [first_shift(series(length, 0.007, seed)).p <= 0.05 for seed in range(600)]
    assert sum(found) / len(found) <= 0.06
    called = [bool(shifts(series(length, 0.007, seed), DELTA)) for seed in range(600)]
    assert sum(called) / len(called) <= 0.05


@pytest.mark.parametrize(("length", "least"), [(8, 0.85), (12, 0.98), (30, 0.99)])
def test_a_step_of_three_percent_amid_noise_of_0_7_is_found_where_it_is(length, least):
    at, found, near = length // 2, 0, 0
    for seed in range(300):
        turns = shifts(series(length, 0.007, seed, [(at, 0.03)]), DELTA)
        found += bool(turns)
        near += any(abs(turn.at - at) <= 1 and turn.log > 0 for turn in turns)
    assert found / 300 >= least
    assert near / 300 >= least - 0.03


def test_a_step_in_the_last_two_is_found_and_one_value_alone_is_not():
    assert [turn.at for turn in shifts([0.0, 0.001, -0.001, 0.0, 0.001, 0.0, 0.05, 0.051], DELTA)] == [6]
    assert shifts([0.0, 0.001, -0.001, 0.0, 0.001, 0.0, -0.001, 0.05], DELTA) == []


def test_several_steps_are_found_in_order():
    turns = shifts(series(30, 0.004, 5, [(10, 0.05), (20, -0.08)]), DELTA)
    assert [turn.at for turn in turns] == [10, 20]
    assert turns[0].log > 0 > turns[1].log


def night(index, us, **changes):
    return sweeps.job(fwd_us=us, bwd_us=None, finished_at=sweeps.NOON + 86400 * index, **changes)


def nights(tmp_path, values, **changes_at):
    """Sweeps of one cell each; `changes_at` are environments by index, as `n3={...}`."""
    environment, found = sweeps.H200, []
    for index, us in enumerate(values):
        environment = environment | changes_at.get(f"n{index}", {})
        found.append(sweeps.sweep(tmp_path / f"night{index}", [night(index, us, environment=environment)]))
    return found


def test_a_change_of_level_names_what_changed_around_it(tmp_path):
    values = [100.0, 100.4, 99.7, 100.1, 100.2, 105.1, 104.8, 105.3, 105.0]
    found = compare(nights(tmp_path, values, n2={"host": "node2"}, n5={"driver": "590"}), history=True)
    (trend,) = found.rows
    (turn,) = trend.turns
    assert (turn.at, turn.change) == (5, pytest.approx(0.05, abs=0.005))
    assert [str(one) for one in turn.coincides] == ["driver 580.1 -> 590"]
    assert (trend.change, trend.n) == (pytest.approx(0.05), 9)
    assert trend.per_sweep > 0
    assert trend.scatter == pytest.approx(0.003, abs=0.002)
    assert [str(one) for one in found.differences] == ["host node1 -> node2", "driver 580.1 -> 590"]


def test_sweeps_stand_in_the_order_of_time_and_gaps_stay_gaps(tmp_path):
    three = nights(tmp_path, [100.0, 101.0, 102.0])
    other = sweeps.sweep(tmp_path / "failed", [sweeps.failed(bwd_us=None, finished_at=sweeps.NOON + 9e6)])
    found = compare([other, three[2], three[0], three[1]], history=True)
    (trend,) = found.rows
    assert [one.name for one in found.sweeps] == ["night0", "night1", "night2", "failed"]
    assert trend.relative == pytest.approx((1.0, 1.01, 1.02, None))
    assert trend.lost and trend.turns == ()
    assert any("1 cells have fewer than 8 values" in note for note in found.notes)


def test_too_few_or_unlike_sweeps_are_refused(tmp_path):
    with pytest.raises(UserError, match="history=true needs 3 sweeps or more, not 2"):
        compare(nights(tmp_path / "a", [100.0, 101.0]), history=True)
    unlike = nights(tmp_path / "b", [100.0, 101.0, 102.0], n1={"power_limit_w": 500.0})
    with pytest.raises(UserError, match="power_limit_w 700 -> 500"):
        compare(unlike, history=True)
    assert compare(unlike, history=True, anyway=True).rows
