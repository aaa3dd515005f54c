"""Intervals over rounds: equal to an independent computation, and honest about their number and memory."""

import dense
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.core.stats.interval import RoundsMean

# On a grid, so that values are equal or differ by more than rounding does.
values = st.integers(-1000, 1000).map(lambda thousandths: thousandths / 1000)


@pytest.mark.parametrize(("rounds", "phi"), [(2, 0.0), (3, 0.8), (7, 0.8), (40, 0.0)])
def test_the_interval_is_that_of_matrices_and_densities(rounds, phi):
    rng = np.random.default_rng(rounds)
    series = rng.normal(0, 1, rounds)
    for index in range(1, rounds):
        series[index] += phi * series[index - 1]
    found = RoundsMean(series.tolist())
    assert found.half_width() == pytest.approx(dense.half_width(series), rel=1e-6)
    beside = found.mean + 0.7
    assert found.half_width(beside) == pytest.approx(dense.half_width(series, beside), rel=1e-6)
    assert found.p_value(found.mean - 0.4) == pytest.approx(1 - dense.within(series, 0.4), rel=1e-6)


@given(st.lists(values, min_size=2, max_size=40), st.floats(0.001, 1000), st.floats(-10, 10))
def test_the_interval_moves_with_the_rounds_and_turns_round_with_them(rounds, factor, shift):
    half = RoundsMean(rounds).half_width()
    moved = RoundsMean([factor * value + shift for value in rounds]).half_width()
    assert moved == pytest.approx(factor * half, rel=1e-6, abs=1e-7 * (factor + abs(shift)))
    assert RoundsMean(rounds[::-1]).half_width() == pytest.approx(half, rel=1e-6, abs=1e-12)


@given(st.lists(values, min_size=2, max_size=40).filter(lambda rounds: len(set(rounds)) > 1), values)
def test_the_p_value_is_five_percent_at_the_ends_and_falls_outwards(rounds, offset):
    found = RoundsMean(rounds)
    half = found.half_width()
    for end in (found.mean - half, found.mean + half):
        assert found.p_value(end) == pytest.approx(0.05, rel=1e-5)
    assert found.p_value(found.mean) == pytest.approx(1.0)
    assert found.p_value(found.mean + 2 * half) < 0.05 < found.p_value(found.mean + half / 2)
    # About another value never wider by more than the offset.
    assert found.half_width(found.mean + offset) <= (half + abs(offset)) * (1 + 1e-6)


def test_rounds_that_stay_near_their_neighbours_say_less_than_those_that_alternate():
    together = RoundsMean([1.0, 1.1, 1.3, 1.2, 0.8, 0.7, 0.9, 1.0])
    apart = RoundsMean([1.0, 0.8, 1.3, 0.7, 1.2, 0.9, 1.1, 1.0])
    assert together.autocorrelation > 0.3 > -0.3 > apart.autocorrelation
    assert together.half_width() > 2 * apart.half_width()
    assert 1 < together.effective_rounds < apart.effective_rounds < 8


@pytest.mark.parametrize("rounds", [[3.0, 3.0], [0.1] * 9])
def test_rounds_without_a_spread_leave_no_doubt(rounds):
    found = RoundsMean(rounds)
    assert found.half_width() == pytest.approx(0.0, abs=1e-12)
    assert found.half_width(found.mean + 1) == pytest.approx(1.0)
    assert found.p_value(found.mean) == 1.0 and found.p_value(found.mean + 1) == 0.0
    assert found.autocorrelation is None and found.effective_rounds is None
