"""Patience: a pass that is unstable when its budget ends goes on, with rounds that are joined in pairs."""

import statistics
from types import SimpleNamespace

import fakes
import inprocess
import numpy as np
import pytest

from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.record.flags import timing_flags
from attn_exp.timers import loop
from attn_exp.timers.loop import Block, Cost, sample
from attn_exp.timers.stopping import StoppingRule
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure

RULES = {
    path.stem: StoppingRule(
        **{key: value for key, value in read_yaml(path).items() if key not in ("settle_s", "regime")}
    )
    for path in (conf_folder() / "stopping").glob("*.yaml")
}
PATIENT = RULES["percent"]


class Noisy:
    """A timer with blocks of 5 ms on a clock of its own, whose times scatter by `sd` from block to block."""

    name, l2, estimates = "device", "cold", True

    def __init__(self, monkeypatch, sd, seed=1):
        self.now, self.sd, self.rng = 0.0, sd, np.random.default_rng(seed)
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def estimate(self, call):
        return Cost(1000.0)

    def block(self, call, calls):
        self.now += calls / 1000
        return Block([100.0 * float(np.exp(self.rng.normal(0, self.sd)))] * calls)


def test_a_calm_pass_costs_no_more_with_patience(monkeypatch):
    rules = {seconds: StoppingRule(0.01, 5, 40, 0.05, seconds) for seconds in (0.0, 5.0)}
    calm = {seconds: sample(Noisy(monkeypatch, 0.003), lambda: None, rule) for seconds, rule in rules.items()}
    assert calm[0.0] == calm[5.0]
    assert calm[5.0].stop_reason in ("precise", "budget") and len(calm[5.0].times_us) <= 5 * 12


@pytest.mark.parametrize("sd", [0.1, 0.2])
def test_an_unstable_pass_goes_on_until_it_is_not_in_at_most_the_most_rounds(monkeypatch, sd):
    short = sample(Noisy(monkeypatch, sd), lambda: None, RULES["quick"])
    assert (short.stop_reason, timing_flags(short, ())) >= ("budget", {"unstable"})
    long = sample(Noisy(monkeypatch, sd), lambda: None, PATIENT)
    assert (long.stop_reason, "unstable" in timing_flags(long, ())) == ("budget", False)
    assert len(long.times_us) > len(short.times_us)
    assert list(long.rounds) == sorted(long.rounds)
    assert set(long.rounds) == set(range(max(long.rounds) + 1)) and max(long.rounds) < 80
    lengths = [long.rounds.count(index) for index in set(long.rounds)]
    # All rounds are of one length, but for the one that was under way when an odd number of them was joined.
    assert long.notes["calls_per_round"] == statistics.mode(lengths) == max(lengths)


def test_patience_has_an_end(monkeypatch):
    timer = Noisy(monkeypatch, 3.0)
    timing = sample(timer, lambda: None, PATIENT)
    assert timing.stop_reason == "budget" and "unstable" in timing_flags(timing, ())
    assert PATIENT.patience_s <= timer.now <= 1.1 * PATIENT.patience_s


def test_rounds_that_can_never_be_enough_are_an_error_and_no_endless_sampling():
    with pytest.raises(ValueError, match="min_rounds=20 cannot be reached in max_rounds=10"):
        StoppingRule(0.01, 20, 10, 0.05)
    record = measure(fakes.make_request(min_rounds=20, max_rounds=10, passes=("forward",)), Machine("cpu"))
    assert (record.status, record.metrics) == ("error", {})
    assert "cannot be reached" in record.reason


def test_the_choices_differ_as_their_names_say(monkeypatch):
    taken = {}
    for name, rule in RULES.items():
        timer = Noisy(monkeypatch, 0.1)
        timing = sample(timer, lambda: None, rule)
        taken[name] = (timer.now, "unstable" in timing_flags(timing, ()))
    assert [name for name, (_, unstable) in taken.items() if unstable] == ["quick"]
    assert sorted(taken, key=lambda name: taken[name][0]) == ["quick", "percent", "default", "thorough"]


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


def test_no_patience_and_no_time_to_settle_are_jobs_of_their_own(monkeypatch, tmp_path):
    typed = inprocess.typed(monkeypatch, tmp_path)
    jobs = [
        typed(*words, "device=cpu", "tracker=none", "dry_run=true")
        for words in ([], ["stopping.patience_s=0"], ["stopping.settle_s=0"], ["stopping.patience_s=5.0"])
    ]
    assert [code for code, _, _ in jobs] == [0] * 4
    names = [out.split()[-1] for _, out, _ in jobs]
    assert len(set(names)) == 3 and names[0] == names[3]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("stopping.min_rounds=90", "stopping.min_rounds=90 stopping.max_rounds=80 cannot be met"),
        ("stopping.patience_s=-1", "stopping.patience_s=-1.0 is not between 0 and 3600 seconds"),
        ("stopping=nonsense", "stopping"),
        ("stop_on=[[]]", "stop_on=[] is no list of statuses: write stop_on=[inaccurate]"),
    ],
)
def test_a_rule_that_cannot_be_met_is_one_sentence(monkeypatch, tmp_path, given, sentence):
    code, out, err = inprocess.typed(monkeypatch, tmp_path)(given, "device=cpu", "tracker=none")
    assert (code, out) == (2, "")
    assert sentence in err and len(err.strip().splitlines()) <= 4, err
