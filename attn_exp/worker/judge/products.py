"""Counts the work of a call on a CPU that computes attention: what a call leaves out, or does early, shows there.

It does not depend on how busy a machine is, as times do. It is counted in operations and not in operators: products of
halves are half of the work, and a tiny one is none. A kernel of a library's own that is no operator of PyTorch's is not
seen.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from time import process_time_ns

from attn_exp.core.text import figures
from attn_exp.timers.operators import sized_operators
from attn_exp.timers.timed_call import Call

# Matrix products, whose FLOPs are known; exponentials, each of which counts as so many; and whole attentions.
_PRODUCTS = re.compile(r"aten::(b?mm|addb?mm|baddbmm)")
_EXPONENTIALS, _OF_EXPONENTIAL = re.compile(r"aten::(_softmax|logsumexp|exp2?_?)"), 32
_ATTENTIONS, _MATRICES = re.compile(r"aten::_scaled_dot_product\w+"), 4
# What a call does more than another one is a share of its work.
_SHARE = 0.01
# Pairs of calls: so many of the same work are enough, or fewer if they take so much CPU time; so many are made at most.
# In nearly all that differ the first must do more: by chance it does in one of 10,000 series.
_ENOUGH, _ENOUGH_NS, _MOST, _CHANCE = 4, 60_000_000, 48, 1e-4
# In so many the second one does more, and not much less often: a backend that chooses among several ways. Of so many it
# is rare that the first one does, which moves no median.
_FEW, _TIMES, _SOME, _RARE = 2, 4, 16, 0.25


def products(call: Call) -> Counter[str]:
    """Return how many operations of each operator that computes attention a call runs."""
    work = Counter[str]()
    for name, shapes, flops in sized_operators(call):
        if _PRODUCTS.fullmatch(name):
            work[name] += int(flops)
        elif _EXPONENTIALS.fullmatch(name):
            work[name] += _OF_EXPONENTIAL * math.prod(shapes[0])
        elif _ATTENTIONS.fullmatch(name):
            # Of a backward the first tensor is the output's gradient, which is as large.
            of_queries, of_keys = shapes[:2] if "backward" not in name else (shapes[0], shapes[2])
            work[name] += _MATRICES * math.prod(of_queries) * of_keys[-2]
    return work


def more_work(found: Counter[str], before: Counter[str]) -> str | None:
    """Return which operators did more than before as words, if that is more work in all, or None."""
    if not _exceeds(found, before):
        return None
    more = sorted(((count - before[name], name) for name, count in found.items() if count > before[name]), reverse=True)
    return ", ".join(
        f"{name} for {figures(found[name] / 1e6)} million operations instead of {figures(before[name] / 1e6)}"
        for _, name in more[:2]
    )


def always_more(pair: Callable[[], tuple[Counter[str], Counter[str]]]) -> str | None:
    """Return what the first calls of pairs do more than the second ones as words, or None.

    A call may do more by chance, as one that chooses among several ways does; then the second one does as often.

    Args:
        pair: makes both calls and returns their `products`.
    """
    more, less, told, began = 0, 0, "", process_time_ns()
    for made in range(1, _MOST + 1):
        first, second = pair()
        if (words := more_work(first, second)) is not None:
            more, told = more + 1, words
        less += _exceeds(second, first)
        if not more and (made >= _ENOUGH or process_time_ns() - began > _ENOUGH_NS):
            return None
        if (less > _FEW and more < _TIMES * less) or (made >= _SOME and more < _RARE * made):
            return None
        if more and _by_chance(more, less) < _CHANCE:
            return told
    return None


def _exceeds(found: Counter[str], before: Counter[str]) -> bool:
    return found.total() - before.total() > _SHARE * found.total()


def _by_chance(more: int, less: int) -> float:
    """Return how probable at least so many of both are more if each is with a probability of a half."""
    count = more + less
    ways: int = sum(math.comb(count, one) for one in range(more, count + 1))
    return ways / (1 << count)
