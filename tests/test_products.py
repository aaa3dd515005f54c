"""Operators are counted, not timed: who leaves work out of timed forwards shows, who chooses at random does not."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from attn_exp.worker.judge.forwards import _check_products
from attn_exp.worker.judge.products import more_often, products
from attn_exp.worker.stopped import Stopped

ONE = torch.ones(4, 4)


def short():
    return torch.softmax(ONE, -1)


def long():
    return torch.softmax(ONE @ ONE, -1)


def judge_of(forward):
    """A judge whose forwards are these."""
    fresh = SimpleNamespace(renew=lambda: None)
    return SimpleNamespace(forward=forward, fresh=fresh, backward_of=lambda out: lambda: None)


def test_matrix_products_and_exponentials_are_counted_and_views_are_not():
    counted = products(lambda: (torch.exp(ONE @ ONE), ONE.view(16), ONE + ONE))
    assert counted == Counter({"aten::matmul": 1, "aten::mm": 1, "aten::exp": 1})
    assert products(lambda: ONE.mT.contiguous()) == Counter()


def test_more_of_any_operator_is_named_and_less_is_not():
    assert more_often(Counter(a=2, b=1), Counter(a=1, b=1)) == "a 2 times instead of 1"
    assert more_often(Counter(a=1), Counter(a=2, b=1)) is None


def test_a_forward_that_always_does_more_once_backwards_came_left_something_out():
    with pytest.raises(Stopped, match="once backwards were timed a forward runs aten::matmul 1 times instead of 0"):
        _check_products(judge_of(long), products(short))
    _check_products(judge_of(short), products(long))
    _check_products(judge_of(long), products(long))


def test_a_forward_that_chooses_among_several_ways_leaves_nothing_out():
    ways = (long, lambda: torch.exp(ONE @ ONE), lambda: torch.softmax(ONE @ ONE @ ONE, -1))
    turn = iter(range(100))
    _check_products(judge_of(lambda: ways[next(turn) % 3]()), products(short))
    dice = random.Random(1)
    for _ in range(10):
        _check_products(judge_of(lambda: dice.choice([short, long])()), products(short))
