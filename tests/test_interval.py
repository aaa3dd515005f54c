"""Intervals over rounds: equal to an independent computation, and honest about their number and memory."""

import math

import dense
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.core.interval import RoundsMean, Uncertainty, combined, log_half_width
from attn_exp.core.student import student_t_975, student_t_p, student_t_within

# On a grid, so that values are equal or differ by more than rounding does.
values = st.integers(-1000, 1000).map(lambda thousandths: thousandths / 1000)


@pytest.mark.parametrize("rounds", [2, 3, 5, 7, 15, 40])
@pytest.mark.parametrize("phi", [0.0, 0.8])
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


def test_autocorrelation_and_effective_rounds_of_many_rounds_are_those_of_the_series():
    """Of 40 rounds with phi, (1 - phi) / (1 + phi) of the rounds count: 40, 21.5 and 4.4 (and the ends)."""
    rng, found = np.random.default_rng(5), {}
    for phi in (0.0, 0.3, 0.8):
        several = []
        for _ in range(200):
            series = [rng.normal()]
            for _ in range(39):
                series.append(phi * series[-1] + math.sqrt(1 - phi * phi) * rng.normal())
            several.append(RoundsMean(series))
        correlation = np.mean([one.autocorrelation for one in several])
        # Kendall's bias: lower by (1 + 4 phi) / n.
        assert correlation == pytest.approx(phi - (1 + 4 * phi) / 40, abs=0.03)
        found[phi] = np.mean([one.effective_rounds for one in several])
    assert 28 < found[0.0] <= 40 and 15 < found[0.3] < 26 and 3 < found[0.8] < 9


@pytest.mark.parametrize("rounds", [[3.0, 3.0], [0.1] * 9])
def test_rounds_without_a_spread_leave_no_doubt(rounds):
    found = RoundsMean(rounds)
    assert found.half_width() == pytest.approx(0.0, abs=1e-12)
    assert found.half_width(found.mean + 1) == pytest.approx(1.0)
    assert found.p_value(found.mean) == 1.0 and found.p_value(found.mean + 1) == 0.0
    assert found.autocorrelation is None and found.effective_rounds is None


def test_two_rounds_have_no_autocorrelation_and_one_round_nothing():
    assert RoundsMean([1.0, 2.0]).autocorrelation is None
    assert 1 < RoundsMean([1.0, 2.0]).effective_rounds < 2
    with pytest.raises(ValueError, match="at least 2 rounds, not 1"):
        RoundsMean([1.0])
    assert log_half_width([1.0]) is log_half_width([]) is None


def test_about_a_median_far_from_the_mean_the_interval_is_wider_by_less_than_that():
    medians = [100.0, 100.1, 103.0, 100.0, 99.9, 103.1, 100.0]
    about_mean, about_median = log_half_width(medians), log_half_width(medians, 100.0)
    assert about_mean < about_median < about_mean + np.mean(np.log(medians)) - math.log(100.0)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 12, 39, 200])
def test_the_finite_series_of_students_t_is_the_fractions(degrees):
    for t in (0.0, 1e-9, 0.3, 1.0, 2.5, 30.0, 1e9):
        assert student_t_within(t, degrees) == pytest.approx(1 - student_t_p(t, degrees), abs=1e-12)
        assert student_t_within(-t, degrees) == -student_t_within(t, degrees)
    with pytest.raises(ValueError, match="at least one degree"):
        student_t_within(1.0, 0)


def test_independent_errors_add_up_as_squares_with_welchs_degrees():
    found = combined([Uncertainty(0.03, 6), Uncertainty(0.04, 6)])
    assert found.half == pytest.approx(0.05)
    # (9 + 16)^2 / (81 / 6 + 256 / 6) = 11.1
    assert found.degrees == 11
    assert found.p_value(0.05) == pytest.approx(0.05, rel=1e-3)
    assert found.p_value(-0.1) == pytest.approx(student_t_p(2 * student_t_975(11), 11))
    assert combined([Uncertainty(0.01, 6), Uncertainty(1.0)]).degrees > 1e6
    assert combined([Uncertainty(0.01), Uncertainty(0.0, 6)]) == Uncertainty(0.01)


def test_without_any_uncertainty_only_nothing_is_no_difference():
    assert combined([]).p_value(0.0) == 1.0 and combined([Uncertainty(0.0)]).p_value(1e-9) == 0.0


def test_a_known_spread_has_the_normal_distributions_tails():
    assert Uncertainty(0.01).p_value(0.01) == pytest.approx(0.05, rel=1e-9)
    assert Uncertainty(0.01).p_value(0.02) == pytest.approx(8.857e-5, rel=1e-3)
