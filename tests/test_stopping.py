"""The rule that ends the turns of a rival, and the choices of `stopping=`."""

from types import SimpleNamespace

import inprocess
import numpy as np
import pytest

from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.record.flags import timing_flags
from attn_exp.timers import loop
from attn_exp.timers.loop import Block, Cost, sample
from attn_exp.timers.stopping import LIMIT_S, StoppingRule

RULES = {path.stem: StoppingRule(**read_yaml(path)) for path in (conf_folder() / "stopping").glob("*.yaml")}
RULE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=40, budget_s=1.5)


@pytest.mark.parametrize(("call_us", "rounds"), [(10.0, 7), (14_000.0, 7), (18_000.0, 5), (60_000.0, 5), (1e6, 5)])
def test_long_calls_need_as_many_rounds_as_take_a_tenth_of_a_second_but_five(call_us, rounds):
    assert RULE.least_rounds(call_us) == rounds


@pytest.mark.parametrize(
    ("rounds", "spent_s", "half", "reason"),
    [(39, 1.4, 0.01, ""), (40, 0.0, 0.01, "max_rounds"), (39, 1.5, 0.02, "budget"), (39, 1.5, 0.021, "")],
)
def test_a_rival_that_is_not_precise_goes_on_until_rounds_or_time_are_over(rounds, spent_s, half, reason):
    assert RULE.over(rounds, spent_s, half) == reason
    assert RULE.over(rounds, spent_s, half, late=True)


def test_a_pass_of_many_rivals_may_take_longer():
    assert [RULE.limit_s(count) for count in (1, 9)] == [LIMIT_S, LIMIT_S + 8]


class Noisy:
    """A timer on a clock of its own, whose times scatter by `sd` from block to block."""

    name, l2, estimates = "device", "cold", True

    def __init__(self, monkeypatch, sd, call_us=1000.0):
        self.now, self.sd, self.call_us, self.rng = 0.0, sd, call_us, np.random.default_rng(1)
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def estimate(self, call):
        return Cost(self.call_us)

    def block(self, call, calls):
        self.now += calls * self.call_us / 1e6
        return Block([self.call_us * float(np.exp(self.rng.normal(0, self.sd)))] * calls)


def test_an_unstable_pass_goes_on_beyond_its_budget_until_it_is_stable(monkeypatch):
    timer, rule = Noisy(monkeypatch, 0.04), RULES["default"]
    timing = sample(timer, lambda: None, rule)
    assert (timing.stop_reason, timing_flags(timing, ()) & {"unstable"}) == ("budget", set())
    assert timer.now > 2 * rule.budget_s and len(set(timing.rounds)) < rule.max_rounds


def test_a_pass_that_never_gets_stable_ends_all_the_same(monkeypatch):
    timer = Noisy(monkeypatch, 3.0, call_us=200_000.0)
    timing = sample(timer, lambda: None, RULES["default"])
    assert timing.stop_reason == "budget" and "unstable" in timing_flags(timing, ())
    assert sum(end - begin for _, begin, end in timing.blocks) == pytest.approx(LIMIT_S + 0.2, abs=0.21)


def test_rounds_that_can_never_be_enough_are_an_error():
    with pytest.raises(ValueError, match="min_rounds=20 cannot be reached in max_rounds=10"):
        StoppingRule(0.01, 20, 10, 0.05)


@pytest.mark.parametrize("sd", [0.003, 0.1])
def test_the_choices_differ_as_their_names_say(monkeypatch, sd):
    taken = {name: len(set(sample(Noisy(monkeypatch, sd), lambda: None, rule).rounds)) for name, rule in RULES.items()}
    assert taken["quick"] < taken["percent"] <= taken["default"] < taken["thorough"]


@pytest.mark.parametrize("arguments", [("stopping=quick",), ("stopping=quick", "-m", "+experiment=sdpa_sweep")])
def test_quick_is_chosen_as_a_group_and_makes_other_jobs(monkeypatch, tmp_path, arguments):
    typed = inprocess.typed(monkeypatch, tmp_path)
    found = {}
    for name, words in {
        "chosen": arguments,
        "plain": arguments[1:],
        "set": ("stopping.budget_s=0.5", *arguments),
    }.items():
        code, out, err = typed(*words, "device=cpu", "tracker=none", "dry_run=true")
        assert (code, err) == (0, "")
        found[name] = out
    assert len(set(found.values())) == 3


def test_a_regime_is_a_job_of_its_own(monkeypatch, tmp_path):
    typed = inprocess.typed(monkeypatch, tmp_path)
    jobs = [
        typed(*words, "device=cpu", "tracker=none", "dry_run=true")
        for words in ([], ["regime=burst"], ["regime=sustained"])
    ]
    assert [code for code, _, _ in jobs] == [0] * 3
    default, burst, sustained = (out.split()[-1] for _, out, _ in jobs)
    assert default == burst != sustained


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("stopping.min_rounds=90", "stopping.min_rounds=90 stopping.max_rounds=80 cannot be met"),
        ("regime=heavy", "regime=heavy is not one of burst, sustained"),
        ("stopping=nonsense", "stopping"),
        ("stop_on=[[]]", "stop_on=[] is no list of statuses: write stop_on=[inaccurate]"),
    ],
)
def test_a_rule_that_cannot_be_met_is_one_sentence(monkeypatch, tmp_path, given, sentence):
    code, out, err = inprocess.typed(monkeypatch, tmp_path)(given, "device=cpu", "tracker=none")
    assert (code, out) == (2, "")
    assert sentence in err and len(err.strip().splitlines()) <= 4, err
