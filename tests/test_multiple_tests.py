"""What is worse than the best of many."""

from math import erfc, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.core.stats.multiple import LEVEL, worse_than_best

p_values = st.lists(st.floats(0, 0.02) | st.floats(0, 1), max_size=12)


def test_one_rival_is_judged_alone_and_several_by_their_pairs():
    assert worse_than_best([]) == []
    assert worse_than_best([0.049]) == [True] and worse_than_best([0.051]) == [False]
    # Nine rivals have 36 pairs.
    assert worse_than_best([0.0013, *[0.5] * 7]) == [True, *[False] * 7]
    assert worse_than_best([0.0015, *[0.5] * 7]) == [False] * 8


def test_a_clearly_worse_row_leaves_a_smaller_group():
    # Of three, 0.05 / 3; of the two that are left, 0.05.
    assert worse_than_best([0.04, 0.016]) == [True, True]
    assert worse_than_best([0.04, 0.017]) == [False, False]
    assert worse_than_best([0.06, 0.016]) == [False, True]


@given(p_values, st.randoms())
def test_the_order_does_not_matter_and_a_smaller_p_value_never_hides_what_a_larger_one_shows(values, random):
    worse = worse_than_best(values)
    order = list(range(len(values)))
    random.shuffle(order)
    if len(set(values)) == len(values):
        assert worse_than_best([values[index] for index in order]) == [worse[index] for index in order]
    assert all(p <= LEVEL for p, one in zip(values, worse, strict=True) if one)
    if any(worse) and not all(worse):
        told, open_ = ([p for p, one in zip(values, worse, strict=True) if one is value] for value in (True, False))
        assert max(told) <= min(open_)


@pytest.mark.parametrize("rivals", [2, 4, 9, 20])
def test_among_equal_rivals_hardly_ever_one_is_called_worse(rivals):
    """In at most 5 % of 4,000 groups with known noise; each rival against the best alone in 58 % for nine."""
    rng = np.random.default_rng(rivals)
    values = np.sort(rng.normal(0, 1, (4000, rivals)), axis=1)

    called = alone = 0
    for row in values:
        p = [erfc((value - row[0]) / 2) for value in row[1:]]
        called += any(worse_than_best(p))
        alone += min(p) <= LEVEL
    assert called / 4000 <= 0.052
    assert alone / 4000 == pytest.approx({2: 0.05, 4: 0.2, 9: 0.58, 20: 0.91}[rivals], abs=0.03)


def test_a_worse_rival_is_found_among_nine_and_a_true_best_is_kept():
    """Eight equal ones and one that is worse by five standard errors of a difference, which is told in 90 %."""

    rng, found, false = np.random.default_rng(3), 0, 0
    for _ in range(2000):
        row = rng.normal(0, 1, 9)
        row[8] += 5 * sqrt(2)
        best = int(np.argmin(row))
        others = [index for index in range(9) if index != best]
        worse = dict(zip(others, worse_than_best([erfc((row[at] - row[best]) / 2) for at in others]), strict=True))
        found += worse.get(8, False)
        false += any(one for at, one in worse.items() if at != 8)
    assert found / 2000 >= 0.95
    assert false / 2000 <= 0.052
