"""Tests of several hypotheses at once: p-values adjusted for their number, and what is not the best of many."""

from collections.abc import Sequence

# The error rate of one interval, and of the verdicts of one comparison of several rivals.
LEVEL = 0.05


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, in the order given: at most q if rejected at the false discovery rate q.

    The k-th smallest of m becomes the least m p_(j) / j over j >= k (Benjamini and Hochberg, Journal of the Royal
    Statistical Society B 57, 289, 1995). That paper assumes independent tests, but pairs that share a rival are
    dependent. Yet the rate was found to hold for all pairwise comparisons (Williams, Jones and Tukey, Journal of
    Educational and Behavioral Statistics 24, 42, 1999), and does in the tests here.
    """
    adjusted, least = [1.0] * len(p_values), 1.0
    descending = sorted(range(len(p_values)), key=lambda index: p_values[index], reverse=True)
    for rank, index in zip(range(len(p_values), 0, -1), descending, strict=True):
        least = min(least, p_values[index] * len(p_values) / rank)
        adjusted[index] = least
    return adjusted


def worse_than_best(p_values: Sequence[float]) -> list[bool]:
    """Return which of several rivals are worse than the best of them, from p-values against the one that looks best.

    Whichever looks best of `k` equal rivals was chosen by chance, so one of k (k - 1) / 2 pairs differs by chance.
    Holm's step-down (Scandinavian Journal of Statistics 6, 65, 1979) calls the rival with the smallest p-value worse if
    that is at most 5 % over the number of pairs. The rest is then a smaller group with fewer pairs, until one is not
    worse. At most 5 % of groups of equal rivals have one that is called worse.

    Args:
        p_values: the two-sided p-value of each rival but the one that looks best, for being equal to it.
    """
    worse = [False] * len(p_values)
    ascending = sorted(range(len(p_values)), key=p_values.__getitem__)
    for left, index in zip(range(len(p_values) + 1, 1, -1), ascending, strict=True):
        if p_values[index] > LEVEL / (left * (left - 1) / 2):
            break
        worse[index] = True
    return worse
