"""Work is counted, not timed: who leaves work out of timed forwards shows, who chooses at random does not."""

import random
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from attn_exp.worker.judge.forwards import _check_products
from attn_exp.worker.judge.products import always_more, more_work, products
from attn_exp.worker.stopped import Stopped

ONE = torch.ones(4, 4)
SMALL, LARGE = Counter(a=100_000_000), Counter(a=200_000_000)


def short():
    return torch.softmax(ONE, -1)


def long():
    return torch.softmax(ONE @ ONE, -1)


def judge_of(forward):
    """A judge whose forwards are these."""
    fresh = SimpleNamespace(renew=lambda: None)
    return SimpleNamespace(forward=forward, fresh=fresh, backward_of=lambda out: lambda: None)


def test_operations_of_matrix_products_and_exponentials_are_counted_and_views_are_not():
    counted = products(lambda: (torch.exp(ONE @ ONE), ONE.view(16), ONE + ONE))
    assert counted == Counter({"aten::mm": 2 * 4**3, "aten::exp": 32 * 16})
    assert products(lambda: ONE.mT.contiguous()) == Counter()


def test_a_whole_attention_counts_as_its_products():
    q, k = torch.ones(2, 3, 8, 16, requires_grad=True), torch.ones(2, 3, 12, 16)
    made = []
    counted = products(lambda: made.append(torch.nn.functional.scaled_dot_product_attention(q, k, k)))
    assert counted.total() == 4 * 6 * 8 * 12 * 16
    assert products(lambda: torch.autograd.grad(made[0].sum(), q)).total() == 4 * 6 * 8 * 12 * 16


def test_the_operators_that_did_more_are_named_and_less_or_next_to_nothing_is_none():
    assert more_work(LARGE, SMALL) == "a for 200.0 million operations instead of 100.0"
    assert more_work(Counter(a=100), Counter(a=200, b=100)) is None
    assert more_work(Counter(a=1000, b=5), Counter(a=1000)) is None


def test_who_does_more_at_first_in_half_of_the_pairs_and_never_the_second_time_is_found():
    dice = random.Random(1)
    found = [always_more(lambda: (dice.choice([SMALL, LARGE]), SMALL)) for _ in range(200)]
    # Four pairs in a row may be alike.
    assert sum(one is not None for one in found) > 170
    assert always_more(lambda: (LARGE, SMALL)) == "a for 200.0 million operations instead of 100.0"


def test_who_chooses_by_chance_both_times_does_not_do_more_at_first():
    dice = random.Random(1)
    assert not any(always_more(lambda: (dice.choice([SMALL, LARGE]), dice.choice([SMALL, LARGE]))) for _ in range(500))
    assert not any(always_more(lambda: dice.sample([SMALL, LARGE], 2)) for _ in range(500))


def test_a_forward_that_always_does_more_once_backwards_came_left_something_out():
    with pytest.raises(Stopped, match="once backwards were timed a forward runs aten::mm for"):
        _check_products(judge_of(long), products(short))
    _check_products(judge_of(short), products(long))
    _check_products(judge_of(long), products(long))


def test_a_forward_that_works_for_one_before_it_whose_output_is_alive_left_something_out():
    alive = weakref.WeakSet()

    def forward():
        out = (long if alive else short)()
        alive.add(out)
        return out

    with pytest.raises(Stopped, match="what a backward needs was left out"):
        _check_products(judge_of(forward), products(short))


def test_a_forward_that_chooses_among_several_ways_leaves_nothing_out():
    ways = (long, short, lambda: torch.exp(ONE @ ONE), lambda: torch.softmax(ONE @ ONE @ ONE, -1))
    turn = iter(range(100))
    _check_products(judge_of(lambda: ways[next(turn) % 4]()), products(short))
    dice = random.Random(1)
    for _ in range(10):
        _check_products(judge_of(lambda: dice.choice([short, long])()), products(short))
