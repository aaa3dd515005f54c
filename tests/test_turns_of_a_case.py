"""The jobs of a case are measured in turns: what they share, whose a fault is, and what they are compared with."""

from dataclasses import replace

import pytest
import torch
from fakes import CASE, Honest, make_request
from test_measure import machine, short_rounds  # noqa: F401 (fixtures)

from attn_exp.attention import contents
from attn_exp.backends.base import calls_of
from attn_exp.core.stats.summary import medians_by_round
from attn_exp.worker import measure as measuring
from attn_exp.worker.measure import Turns, measure_case
from attn_exp.worker.prepare import prepare

FORWARD = {"passes": ("forward",)}
SEEN = []


class Looks(Honest):
    """Keeps the inputs that it got."""

    def prepare(self, case, inputs):
        SEEN.append(inputs)
        return super().prepare(case, inputs)


class Writes(Honest):
    """Writes into q from call `after` on, `times` times at most; `raises` then."""

    def __init__(self, name, after=12, times=10**9, raises=False):
        super().__init__(name)
        self.after, self.left, self.raises = after, times, raises

    def prepare(self, case, inputs):
        right, calls = super().prepare(case, inputs), [0]

        def forward():
            calls[0] += 1
            out = right.forward()
            if calls[0] > self.after and self.left:
                self.left -= 1
                inputs.q_bhsd.data.mul_(0.5)
                if self.raises:
                    raise RuntimeError("out of luck")
            return out

        return replace(right, forward=forward)


class LateTile(Honest):
    """From call 40 on the last rows of every head are zeros."""

    def prepare(self, case, inputs):
        right, calls = super().prepare(case, inputs), [0]

        def attention(q, k, v):
            calls[0] += 1
            out = right.attention(q, k, v)
            return torch.cat([out[..., :-8, :], 0 * out[..., -8:, :]], -2) if calls[0] > 40 else out

        return calls_of(attention, inputs)


class Slower(Honest):
    """Computes forty times: also a busy machine makes it no faster than the others."""

    def prepare(self, case, inputs):
        right = super().prepare(case, inputs)
        return replace(right, forward=lambda: [right.forward() for _ in range(40)][-1])


def jobs(*targets, case=CASE, **measuring):
    made = []
    for index, target in enumerate(targets):
        backend = {"_target_": target} if isinstance(target, str) else dict(target)
        made.append(make_request({"name": f"b{index}"} | backend, case, **FORWARD | measuring))
    return [replace(one, job=f"fake-{index}") for index, one in enumerate(made)]


HONEST = "fakes.Honest"
BOTH = {"passes": ("forward", "backward")}


def statuses(found):
    return [(one.status, one.reason) for one in found]


def test_rivals_share_the_memory_of_their_inputs_and_have_leaves_of_their_own(machine):  # noqa: F811
    SEEN.clear()
    found = measure_case(jobs(*[f"{__name__}.Looks"] * 2, **BOTH), machine)
    assert statuses(found) == [("ok", None)] * 2
    one, other = SEEN[:2]
    for mine, yours in zip((*one.qkv, one.d_out_bhsd), (*other.qkv, other.d_out_bhsd), strict=True):
        assert mine is not yours and mine.data_ptr() == yours.data_ptr()
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in (*one.qkv, *other.qkv))


def test_a_sign_changes_for_all_rivals_of_a_round_at_once(machine, monkeypatch):  # noqa: F811
    changed = []
    monkeypatch.setattr(contents, "negate", lambda tensor, real=contents.negate: (changed.append(tensor), real(tensor)))
    states = []

    def change_all(several, direction):
        before = len(changed)
        contents.change_all(several, direction)
        states.append(([one.state for one in several], len(changed) - before))

    monkeypatch.setattr(measuring, "change_all", change_all)
    assert statuses(measure_case(jobs(HONEST, HONEST, HONEST), machine)) == [("ok", None)] * 3
    assert len(states) == 3, "both rounds are drawn, and the last one always"
    for alike, count in states:
        assert len(alike) == 3 and len(set(alike)) == 1 and 1 <= count <= 3


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("rivals", [2, 3])
def test_a_rival_that_writes_into_its_inputs_while_it_is_timed_is_found_among_the_others(machine, position, rivals):  # noqa: F811
    position %= rivals
    targets = [HONEST] * rivals
    targets[position] = f"{__name__}.Writes"
    found = measure_case(jobs(*targets), machine)
    assert [one.status for one in found] == ["inaccurate" if at == position else "ok" for at in range(rivals)]
    assert found[position].reason == "the backend wrote into its input q"


def test_inputs_that_nobody_changes_again_are_nobodys_fault_and_each_is_measured_alone(machine):  # noqa: F811
    once = {"_target_": f"{__name__}.Writes", "times": 1}
    found = measure_case(jobs(HONEST, once), machine)
    # Alone, the one that writes is found.
    assert [one.status for one in found] == ["ok", "inaccurate"]
    assert all("apart" in one.flags for one in found)


def test_inputs_that_a_rival_changed_before_it_raised_are_no_fault_of_the_one_that_is_left(machine):  # noqa: F811
    found = measure_case(jobs(HONEST, {"_target_": f"{__name__}.Writes", "raises": True}), machine)
    assert statuses(found) == [("ok", None), ("error", "RuntimeError: out of luck")]


@pytest.mark.parametrize("order", [1, -1])
def test_a_rival_that_fails_to_prepare_stops_no_other_and_leaves_them_their_inputs(machine, order):  # noqa: F811
    spoils = {"_target_": f"{__name__}.Writes", "after": 0}
    raises = {"_target_": "fakes.Raises", "what": "RuntimeError", "where": "prepare"}
    found = measure_case(jobs(*[HONEST, spoils, raises, HONEST][::order]), machine)[::order]
    assert [one.status for one in found] == ["ok", "inaccurate", "error", "ok"]


@pytest.mark.parametrize("again", [False, True])
def test_a_job_that_the_memory_does_not_hold_beside_others_is_measured_alone(machine, monkeypatch, again):  # noqa: F811
    tried = []

    def full(attempt, machine):
        tried.append(attempt.request.job)
        if attempt.request.job == "fake-1" and (again or tried.count("fake-1") == 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prepare(attempt, machine)

    monkeypatch.setattr(measuring, "prepare", full)
    kept = []
    turns = Turns(keep=lambda position, record: kept.append((position, record.status)))
    first, second, third = measure_case(jobs(HONEST, HONEST, HONEST), machine, turns=turns)
    assert tried == ["fake-0", "fake-1", "fake-2", "fake-1"]
    status = "out_of_memory" if again else "ok"
    assert (first.status, second.status, third.status) == ("ok", status, "ok")
    assert kept == [(0, "ok"), (2, "ok"), (1, status)]
    assert ["apart" in one.flags for one in (first, second, third)] == [False, True, False]


def test_ratios_are_to_the_fastest_by_round(machine):  # noqa: F811
    slow, fast = measure_case(jobs(f"{__name__}.Slower", HONEST, min_rounds=5, max_rounds=5), machine)
    of_slow, of_fast = (one.passes["forward"] for one in (slow, fast))
    assert (of_fast.paired.base, of_fast.paired.rounds) == ("fake-1", 0)
    assert of_slow.paired.base == "fake-1" and of_slow.paired.timing is None
    rounds = [set(medians_by_round(one.timings[0].times_us, one.timings[0].rounds)) for one in (of_slow, of_fast)]
    assert of_slow.paired.rounds == len(rounds[0] & rounds[1]) == 6
    assert of_slow.paired.log_ratio > 0.2


def test_a_job_beside_them_is_the_base_has_no_record_and_leaves_its_samples(machine):  # noqa: F811
    requests = jobs(HONEST, HONEST, f"{__name__}.Slower", min_rounds=5, max_rounds=5)
    kept = []
    turns = Turns(keep=lambda position, record: kept.append(position), beside=True)
    found = measure_case(requests, machine, turns=turns)
    assert len(found) == 2 and kept == [0, 1]
    for record in found:
        paired = record.passes["forward"].paired
        assert paired.base == "fake-2" and paired.log_ratio < -0.2
        assert len(set(paired.timing.rounds)) == 6


def test_a_backend_that_is_wrong_from_some_call_on_is_inaccurate(machine):  # noqa: F811
    case = replace(CASE, q_len=128, kv_len=128)
    found = measure_case(jobs(HONEST, f"{__name__}.LateTile", case=case, min_rounds=5, max_rounds=5), machine)
    assert [one.status for one in found] == ["ok", "inaccurate"]
    assert "timed block " in found[1].reason
    assert [one.index for one in found[0].judged if one.call == "timed"][-1] == 6, "the last round is always checked"
