import itertools
import math
import statistics
from dataclasses import replace

import dense
import drift
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.core.stats.interval import log_half_width
from attn_exp.core.stats.multiple import benjamini_hochberg
from attn_exp.core.stats.paired import MARGIN_FLOOR, abba_order, compare_all, compare_pair, margin_from_aa

ROUNDS = (7, 11, 15)
OPPOSITE = {"faster": "slower", "slower": "faster", "equivalent": "equivalent", "undecided": "undecided"}

# On a grid, so that times are equal or differ by more than rounding does.
times = st.integers(1_000, 1_000_000).map(lambda nanoseconds: nanoseconds / 1000)
two_rivals = st.integers(2, 12).flatmap(lambda n: st.tuples(*[st.lists(times, min_size=n, max_size=n)] * 2))
margins = st.floats(1e-4, 2.0)


def orders(rivals, rounds):
    return [abba_order(rivals, index) for index in range(rounds)]


def test_two_rivals_run_abba():
    assert orders(2, 6) == [(0, 1), (1, 0)] * 3
    assert orders(1, 3) == [(0,)] * 3


@given(st.integers(2, 6), st.integers(0, 5))
def test_each_rival_stands_in_each_position_once_in_as_many_rounds_as_rivals(rivals, turn):
    found = orders(rivals, rivals * (turn + 1))[rivals * turn :]
    assert all(sorted(order) == list(range(rivals)) for order in found)
    assert all(sorted(column) == list(range(rivals)) for column in zip(*found, strict=True))


def test_a_comparison_of_known_medians():
    a, b = [100.0, 101.0, 99.5, 100.4, 102.0], [113.0, 113.5, 113.2, 112.6, 115.5]
    found = compare_pair(a, b, 0.01)
    ratios = [math.log(time_b / time_a) for time_a, time_b in zip(a, b, strict=True)]
    assert found.effect == pytest.approx(math.expm1(statistics.fmean(ratios)), rel=1e-9)
    half = dense.half_width(ratios)
    assert (math.log1p(found.low), math.log1p(found.high)) == pytest.approx(
        (math.log1p(found.effect) - half, math.log1p(found.effect) + half), rel=1e-6
    )
    assert found.p == found.p_adjusted == pytest.approx(1 - dense.within(ratios, statistics.fmean(ratios)), rel=1e-6)
    assert (found.a, found.b, found.rounds, found.margin, found.verdict) == (0, 1, 5, 0.01, "faster")


def noisy(ratio, half):
    """Eight rounds of two rivals whose log ratios have exactly this mean and interval."""
    deviations = np.array([1.0, -1.0, -0.5, 0.5, 0.5, -0.5, -1.0, 1.0])
    ratios = math.log(ratio) + half * deviations / dense.half_width(deviations)
    return [100.0] * 8, (100 * np.exp(ratios)).tolist()


@pytest.mark.parametrize(
    ("ratio", "half", "verdict"),
    [
        (1.03, 0.0084, "faster"),
        (1 / 1.03, 0.0084, "slower"),
        (1.0101, 1e-6, "faster"),
        (1.0, 0.0084, "equivalent"),
        (1.0, 0.017, "undecided"),
        (1.009, 1e-6, "equivalent"),  # different for sure, and too little
        (1.008, 0.0042, "undecided"),  # different for sure, by too little or by enough
        (1.03, 0.042, "undecided"),
    ],
)
def test_the_rule(ratio, half, verdict):
    found = compare_pair(*noisy(ratio, half), 0.01)
    assert found.verdict == verdict
    assert found.effect == pytest.approx(ratio - 1, abs=1e-12)
    assert math.log1p(found.high) - math.log(ratio) == pytest.approx(half, rel=1e-4)
    assert math.log(ratio) - math.log1p(found.low) == pytest.approx(half, rel=1e-4)


def test_a_wider_delta_makes_a_difference_equivalent_and_a_higher_rate_does_not_replace_the_interval():
    pair = noisy(1.03, 0.0084)
    assert compare_pair(*pair, 0.05).verdict == "equivalent"
    unsure = noisy(1.03, 0.042)
    assert compare_all(unsure, 0.01, false_discovery_rate=0.9)[0].verdict == "undecided"


@given(two_rivals, margins)
def test_exchanging_the_rivals_exchanges_the_verdict(pair, margin):
    one, other = compare_pair(*pair, margin), compare_pair(*pair[::-1], margin)
    assert other.verdict == OPPOSITE[one.verdict]
    assert other.p == one.p
    assert (1 + one.effect) * (1 + other.effect) == pytest.approx(1, rel=1e-9)
    if max(one.high, other.high) < 1e6:
        assert (1 + one.low) * (1 + other.high) == pytest.approx(1, rel=1e-6)


@given(two_rivals, margins, st.integers(-20, 20))
def test_the_unit_does_not_matter(pair, margin, power):
    scaled = compare_pair(*([time * 2.0**power for time in medians] for medians in pair), margin)
    found = compare_pair(*pair, margin)
    assert math.log1p(scaled.effect) == pytest.approx(math.log1p(found.effect), rel=1e-9, abs=1e-12)
    assert scaled.p == pytest.approx(found.p, rel=1e-3, abs=1e-9)


@given(two_rivals, margins)
def test_a_verdict_agrees_with_its_own_numbers(pair, margin):
    found = compare_pair(*pair, margin)
    assert found.low <= found.effect * (1 + 1e-12) + 1e-12 and found.effect <= found.high * (1 + 1e-12) + 1e-12
    assert 0 <= found.p <= 1
    if found.verdict == "faster":
        assert found.low > 0 and found.effect >= margin * (1 - 1e-9) and found.p < 0.051
    if found.verdict == "slower":
        assert found.high < 0 and found.effect <= -margin / (1 + margin) * (1 - 1e-9) and found.p < 0.051
    if found.verdict == "equivalent":
        assert found.high <= margin * (1 + 1e-9) and found.low >= -margin / (1 + margin) * (1 + 1e-9)


def test_rounds_without_any_spread_are_judged_exactly():
    same = compare_pair([5.0, 7.0, 5.0], [5.0, 7.0, 5.0], 0.01)
    assert (same.effect, same.low, same.high, same.p, same.verdict) == (0, 0, 0, 1, "equivalent")
    twice = compare_pair([1.0, 1.0], [2.0, 2.0], 0.01)
    assert (twice.p, twice.p_adjusted, twice.verdict) == (0, 0, "faster")
    assert twice.effect == twice.low == twice.high == pytest.approx(1.0)
    # Equal but for rounding.
    assert compare_pair([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], 0.01).p < 1e-20


@pytest.mark.parametrize(
    ("medians", "options", "why"),
    [
        ([[1.0], [1.0]], {}, "at least 2 rounds, not 1"),
        ([[1.0, 2.0], [1.0, 2.0, 3.0]], {}, r"the same rounds, but their numbers are \[2, 3\]"),
        ([[1.0, 0.0], [1.0, 2.0]], {}, "positive and finite, not 0.0"),
        ([[1.0, 2.0], [1.0, math.nan]], {}, "positive and finite, not nan"),
        ([[1.0, 2.0], [1.0, 2.0]], {"margin": 0.0}, "margin must be positive"),
    ],
)
def test_incomparable_rows_are_refused(medians, options, why):
    with pytest.raises(ValueError, match=why):
        compare_all(medians, **{"margin": 0.01, **options})


def test_all_pairs_come_in_order_and_equal_the_pairs_alone_but_for_the_adjustment():
    rivals = [[100.0, 101.0, 102.0], [140.0, 142.0, 143.0], [100.0, 102.0, 101.0]]
    found = compare_all(rivals, 0.01)
    assert [(each.a, each.b) for each in found] == [(0, 1), (0, 2), (1, 2)]
    for each in found:
        alone = compare_pair(rivals[each.a], rivals[each.b], 0.01)
        assert replace(each, a=0, b=1, p_adjusted=alone.p_adjusted, verdict=alone.verdict) == alone
        assert each.p_adjusted >= each.p
    assert [each.verdict for each in found] == ["faster", "undecided", "slower"]
    assert compare_all([[1.0, 2.0]], 0.01) == compare_all([], 0.01) == []


def test_a_difference_that_one_pair_would_show_is_not_called_among_many_pairs():
    rng = np.random.default_rng(3)
    pair = noisy(1.03, 0.012)
    assert 0.001 < compare_pair(*pair, 0.01).p < 0.01
    assert compare_pair(*pair, 0.01).verdict == "faster"
    others = (100 * np.exp(rng.normal(0.015, 0.02, (6, 8)))).tolist()
    first = compare_all([*pair, *others], 0.01)[0]
    assert first.p < 0.01 < first.p_adjusted
    assert first.verdict == "undecided"


# The example of Benjamini and Hochberg's paper (section 3.3): 4 of 15 are rejected at 5 %, Bonferroni rejects 3.
PAPER = [
    0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344,
    0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0,
]  # fmt: skip


def test_benjamini_and_hochbergs_own_example():
    adjusted = benjamini_hochberg(PAPER)
    assert sum(p <= 0.05 for p in adjusted) == 4
    assert adjusted[:4] == pytest.approx([0.0015, 0.003, 0.0095, 0.035625])
    assert benjamini_hochberg([]) == []


@given(st.lists(st.floats(0, 0.1) | st.floats(0, 1), max_size=12), st.sampled_from([0.01, 0.05, 0.2]), st.randoms())
def test_adjusting_is_the_step_up_procedure_in_any_order(p_values, rate, random):
    random.shuffle(p_values)
    ordered, m = sorted(p_values), len(p_values)
    largest = max((rank for rank in range(1, m + 1) if ordered[rank - 1] * m / rank <= rate), default=0)
    rejected = [p <= rate for p in benjamini_hochberg(p_values)]
    assert rejected == [largest > 0 and p <= ordered[largest - 1] for p in p_values]


def test_delta_is_the_95th_percentile_of_aa_but_at_least_1_percent():
    assert margin_from_aa([0.001, -0.002]) == MARGIN_FLOOR == 0.01
    assert margin_from_aa([-0.02, 0.0, 0.01]) == pytest.approx(0.019)
    assert margin_from_aa([0.001 * index for index in range(101)]) == pytest.approx(0.095)
    with pytest.raises(ValueError, match="at least one A/A"):
        margin_from_aa([])


def compared(rng, kind, rounds, block_sd, effect, count, margin=MARGIN_FLOOR):
    """`count` interleaved sessions of two rivals, the second slower by `effect`."""
    order, times_us = drift.interleaved(2, rounds), [100.0, 100.0 * (1 + effect)]
    sessions = (drift.draw(rng, kind, 2 * rounds, block_sd=block_sd) for _ in range(count))
    return [compare_pair(*drift.medians(drift.run(series, order, times_us)), margin) for series in sessions]


def called(comparisons):
    """The share that is called different."""
    return sum(each.verdict in ("faster", "slower") for each in comparisons) / len(comparisons)


# Thousands of duels take seconds: of the drifts, none and the one that leaps; their intervals are tried of all.
CALM_AND_NOT = ("white", "throttle")


@pytest.mark.parametrize("kind", CALM_AND_NOT)
def test_equal_rivals_are_rarely_called_different(kind):
    """By interval in at most 0.5 % of 2,700 A/A comparisons of few rounds, with a margin from others in 0.3 %."""
    rng = np.random.default_rng(29)
    by_interval, with_delta = [], []
    for rounds, block_sd in itertools.product(ROUNDS, (0.005, 0.01, 0.02)):
        margin = margin_from_aa([each.effect for each in compared(rng, kind, rounds, block_sd, 0.0, 200)])
        found = compared(rng, kind, rounds, block_sd, 0.0, 300, margin)
        by_interval += [each.low > 0 or each.high < 0 for each in found]
        with_delta.append(called(found))
    assert statistics.fmean(by_interval) <= 0.02
    assert statistics.fmean(with_delta) <= 0.01


def stopped(rng, kind, count):
    """`count` duels of equals, noise of 0.3 to 1 % a block, until the ratio is known to 0.5 %, in 7 to 40 rounds."""
    found = []
    for index in range(count):
        series = drift.draw(rng, kind, 80, block_sd=(0.003, 0.005, 0.01)[index % 3])
        a, b = drift.medians(drift.run(series, drift.interleaved(2, 40), [100.0, 100.0]))
        ratios = [time_b / time_a for time_a, time_b in zip(a, b, strict=True)]
        rounds = next((n for n in range(7, 40) if log_half_width(ratios[:n]) <= 0.005), 40)
        found.append(compare_pair(a[:rounds], b[:rounds], MARGIN_FLOOR))
    return found


@pytest.mark.parametrize("kind", CALM_AND_NOT)
def test_stopping_when_the_ratio_is_precise_costs_little(kind):
    """Looking after each round whether to stop favours intervals that chance made narrow."""
    found = stopped(np.random.default_rng(61), kind, 150)
    assert sum(each.low > 0 or each.high < 0 for each in found) / 150 <= 0.05
    assert called(found) <= 0.01
    assert sum(each.verdict == "equivalent" for each in found) / 150 >= 0.85


@pytest.mark.parametrize("kind", drift.KINDS)
def test_the_interval_of_the_ratio_covers_it_under_any_drift(kind):
    rng = np.random.default_rng(41)
    found = [each for rounds in ROUNDS for each in compared(rng, kind, rounds, 0.01, 0.05, 600)]
    assert sum(each.low <= 0.05 <= each.high for each in found) / len(found) >= 0.98


@pytest.mark.parametrize("rivals", [2, 3, 4])
def test_the_cost_of_a_position_is_not_taken_for_a_rivals_fault(rivals):
    rng, rounds = np.random.default_rng(47), 24
    cost = np.tile(np.r_[0.03, np.zeros(rivals - 1)], rounds)  # whoever is first in a round
    for _ in range(20):
        series = replace(drift.draw(rng, "white", rivals * rounds, block_sd=0.002), clock=cost)
        rotated = drift.medians(drift.run(series, drift.interleaved(rivals, rounds), [100.0] * rivals))
        assert called(compare_all(rotated, MARGIN_FLOOR)) == 0
        fixed = drift.medians(drift.run(series, np.tile(np.arange(rivals), rounds), [100.0] * rivals))
        assert called(compare_all(fixed, MARGIN_FLOOR)) >= 2 / rivals - 0.01


def test_among_pairs_of_equals_and_unequals_the_false_share_stays_small_and_the_true_ones_are_found():
    rng, order, false_shares, found_shares = np.random.default_rng(59), drift.interleaved(6, 30), [], []
    for index in range(120):
        series = drift.draw(rng, drift.KINDS[index % 4], 180, block_sd=0.01)
        rounds = drift.medians(drift.run(series, order, [100.0] * 3 + [105.0] * 3))
        judged = [each for each in compare_all(rounds, MARGIN_FLOOR) if each.verdict in ("faster", "slower")]
        true = [each for each in judged if each.a < 3 <= each.b]
        assert all(each.verdict == "faster" for each in true)
        false_shares.append(1 - len(true) / max(1, len(judged)))
        found_shares.append(len(true) / 9)
    assert statistics.fmean(false_shares) <= 0.05
    assert statistics.fmean(found_shares) >= 0.95
