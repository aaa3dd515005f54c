import itertools

import dense
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.core.stats.interval import log_half_width
from attn_exp.core.stats.student import student_t_975, student_t_p
from attn_exp.core.stats.summary import round_medians, summarize

# Upper 2.5 % points of Student's t: NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.2.
TABLE = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    12: 2.179, 15: 2.131, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 100: 1.984,
}  # fmt: skip

times = st.floats(0.01, 1e7)


@pytest.mark.parametrize("degrees", TABLE)
def test_student_t_is_the_tables(degrees):
    allowed = 0.005 if degrees < 7 else 0.0001
    half_a_digit = 0.0005 / TABLE[degrees]
    assert student_t_975(degrees) == pytest.approx(TABLE[degrees], rel=allowed + half_a_digit)


# 2 * scipy.stats.t.sf(t, degrees), SciPy 1.17.1.
P_VALUES = [
    (2, 3.0, 0.09546596626670913), (6, 2.5, 0.0465282322841673), (9, 0.3, 0.7709907037415248),
    (14, 12.0, 9.353330739367844e-09), (39, 40.0, 2.818811402796312e-33), (100, 1.96, 0.05277890136622966),
]  # fmt: skip


@pytest.mark.parametrize(("degrees", "t", "p"), P_VALUES)
def test_the_p_value_of_students_t_is_scipys(degrees, t, p):
    assert student_t_p(t, degrees) == student_t_p(-t, degrees) == pytest.approx(p, rel=1e-11)


def test_round_medians_follow_the_index_of_the_round():
    assert round_medians([5.0, 1.0, 9.0, 2.0, 4.0], [1, 0, 1, 0, 1]) == [1.5, 5.0]
    with pytest.raises(ValueError):
        round_medians([1.0, 2.0], [0])


def test_half_width_is_that_of_the_logs():
    medians = [100.0, 101.0, 99.0, 100.5, 102.0]
    assert log_half_width(medians) == pytest.approx(dense.half_width(np.log(medians)), rel=1e-6)
    assert log_half_width([100.0]) is None
    assert log_half_width([]) is None
    assert log_half_width([7.0] * 9) == pytest.approx(0.0, abs=1e-12)


def test_a_summary_of_known_samples():
    found = summarize([4.0, 2.0, 3.0, 1.0, 5.0, 3.0], [0, 0, 0, 1, 1, 1])
    assert (found.n, found.rounds, found.median_us, found.mean_us, found.min_us) == (6, 2, 3.0, 3.0, 1.0)
    assert (found.p20_us, found.p80_us, found.relative_spread, found.outliers) == (2.0, 4.0, 2 / 3, 0)
    # both rounds have a median of 3: no width
    assert found.low_us == found.high_us == 3.0
    assert found.half_width == 0.0


@given(st.lists(times, min_size=1, max_size=40), st.integers(1, 8))
def test_a_summary_is_ordered_and_keeps_every_sample(samples, per_round):
    rounds = [index // per_round for index in range(len(samples))]
    found = summarize(samples, rounds)
    ordered = [found.min_us, found.p5_us, found.p20_us, found.median_us, found.p80_us, found.p95_us, max(samples)]
    assert all(one <= other * (1 + 1e-12) for one, other in itertools.pairwise(ordered))
    assert found.n == len(samples)
    assert found.rounds == rounds[-1] + 1
    if found.rounds < 2:
        assert found.low_us is found.high_us is found.half_width is None
    else:
        assert found.low_us <= found.median_us <= found.high_us


def test_outliers_are_counted_and_not_dropped():
    plain = [100.0 + i for i in range(20)]
    found = summarize([*plain, 1000.0], [0] * 21)
    assert (found.n, found.outliers) == (21, 1)
    assert found.mean_us == pytest.approx((sum(plain) + 1000) / 21)
    assert summarize([*plain, 140.0], [0] * 21).outliers == 0  # beyond 1.5 ranges, within 3
    assert summarize([*plain, 1.0], [0] * 21).outliers == 1


def test_the_interval_covers_the_truth_where_samples_of_a_round_share_their_error():
    rng = np.random.default_rng(20240611)
    covered = 0
    for _ in range(400):
        shared = np.repeat(rng.normal(0, 0.01, 9), 20)
        samples = 100 * np.exp(shared + rng.normal(0, 0.001, 180))
        found = summarize(samples.tolist(), np.repeat(np.arange(9), 20).tolist())
        covered += found.low_us <= 100 <= found.high_us
    assert covered / 400 >= 0.93
