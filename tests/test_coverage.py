"""What intervals cover and verdicts get wrong, in simulations with fixed seeds; bench/intervals.py has more of them."""

import numpy as np
import pytest
import simulated
from simulated import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_interval_covers_the_mean_however_rounds_depend_on_each_other(kind):
    for rounds, count in ((5, 800), (7, 800), (20, 500), (40, 300)):
        covered, _ = simulated.coverage(np.random.default_rng(rounds), kind, rounds, count)
        assert covered >= 0.93


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_duels_of_equals_are_hardly_ever_told_and_cover_the_effect(kind, shared):
    count = 120
    for sd in (0.003, 0.01):
        missed, faster, slower, _ = simulated.duels(np.random.default_rng(3), kind, sd, count, shared=shared)
        # 93 %, less what 120 draws scatter by.
        assert missed <= 0.07 + 0.02
        assert faster + slower <= 0.01 + 0.01


@pytest.mark.parametrize(
    ("kind", "power"), [("independent", 0.98), ("two states", 0.98), ("AR(1) 0.5", 0.55), ("AR(1) 0.8", 0.15)]
)
def test_duels_find_three_percent(kind, power):
    """With 1 % of noise a round, own; at 0.3 % in all kinds."""
    _, faster, slower, _ = simulated.duels(np.random.default_rng(4), kind, 0.01, 60, shared=False, effect=0.03)
    assert faster >= power and slower == 0
    _, faster, slower, _ = simulated.duels(np.random.default_rng(4), kind, 0.003, 60, shared=False, effect=0.03)
    assert faster >= 0.95 and slower == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sd", [0.001, 0.01])
def test_of_nine_equal_rows_hardly_ever_one_is_called_worse(kind, sd):
    rng = np.random.default_rng(5)
    called = np.mean([bool(simulated.table(rng, kind, 7, sd, 9)) for _ in range(150)])
    assert called <= 0.05
    pairs = np.mean([bool(simulated.table(rng, kind, 7, sd, 2)) for _ in range(150)])
    assert pairs <= 0.06


def test_a_row_that_is_three_percent_slower_is_found_where_rounds_are_calm():
    """In 7 rounds with 0.1 % of noise, among two rows and among nine; nine equal ones were told in 58 % before."""
    rng = np.random.default_rng(6)
    for rivals, power in ((2, 0.98), (9, 0.9)):
        assert np.mean([rivals - 1 in simulated.table(rng, "independent", 7, 0.001, rivals, slower=0.03)
                        for _ in range(150)]) >= power  # fmt: skip
    before = [bool(simulated.table(rng, "independent", 7, 0.001, 9, simulated.student)) for _ in range(150)]
    assert 0.45 <= np.mean(before) <= 0.7
