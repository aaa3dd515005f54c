"""Steps are compared with steps whose gradient is new after the forward."""

from types import SimpleNamespace

import pytest
import torch
from fakes import make_request

from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge import pairs
from attn_exp.worker.judge.steps import check_steps
from attn_exp.worker.stopped import Stopped

ONE = torch.ones(4, 4)


class Told:
    """A judge and a clock of steps that take what `cost` says of whether their gradient was known to the forward."""

    def __init__(self, cost, on_gpu=True):
        self.now, self.version, self.cost, self.on_gpu, self.steps = 0.0, 0, cost, on_gpu, 0
        self.fresh = SimpleNamespace(renew=lambda: None, renew_gradient=self.renew_gradient)

    def renew_gradient(self):
        self.version += 1

    def forward(self):
        self.steps += 1
        return self.version

    def backward_of(self, out):
        def backward():
            self.now += self.cost(out == self.version)

        return backward

    def time_us(self, call, before):
        before()
        began = self.now
        call()
        return self.now - began


def check(told):
    check_steps(Attempt(make_request("fakes.Honest", passes=("step",))), told, told)


def test_a_step_that_takes_longer_with_a_new_gradient_is_implausible():
    with pytest.raises(Stopped, match=r"with a gradient that is new .* takes 130.0 us, 100.0 us with one that"):
        check(Told(lambda known: 100.0 if known else 130.0))


def test_steps_that_take_equally_long_are_made_twice_each():
    told = Told(lambda known: 100.0)
    check(told)
    assert told.steps == 4


def test_on_a_cpu_operators_are_counted():
    def product(count):
        for _ in range(count):
            ONE @ ONE
        return 1.0

    with pytest.raises(Stopped, match=r"it runs aten::mm for \S+ million operations instead of \S+: "):
        check(Told(lambda known: product(2 if known else 3), on_gpu=False))
    told = Told(lambda known: product(2), on_gpu=False)
    check(told)
    # Four pairs are counted, two are timed.
    assert told.steps == 12
    turns = iter(range(100))
    check(Told(lambda known: product(3 if not known and next(turns) == 0 else 2), on_gpu=False))


def test_on_a_cpu_steps_without_such_operators_are_timed():
    with pytest.raises(Stopped, match=r"takes 400.0 us, 100.0 us with"):
        check(Told(lambda known: 100.0 if known else 400.0, on_gpu=False))


def test_the_share_that_is_called_longer_is_five_standard_deviations_from_a_half():
    n = pairs.MOST
    deviations = (pairs._SHARE - 0.5) * n * n / (n * n * (2 * n + 1) / 12) ** 0.5
    assert deviations == pytest.approx(5.0, abs=0.1)
