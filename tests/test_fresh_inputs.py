"""Inputs that change between timed calls, and probes of a few rows."""

import random
import re
from dataclasses import replace

import pytest
import torch
from cheats.corpus import Entry
from cheats.run import outcome, shared_machine
from cheats.ways import Plain
from fakes import CASE

from attn_exp.attention.call_sums import Summing
from attn_exp.attention.expected import expected
from attn_exp.attention.fresh_inputs import FreshInputs, State, flip_signs, rows_of
from attn_exp.attention.head_sums import LEAST_KEYS
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.probe import Probe, allowed_error, draw_places, probe_errors, usual_size
from attn_exp.attention.reference import reference
from attn_exp.worker.judge.looks import Looks
from attn_exp.worker.judge.timed_pass import TimedPass

WIDE = replace(CASE, batch=2, q_heads=4, kv_heads=2, q_len=33, kv_len=40, head_dim=24, value_dim=16)
CASES = {
    "float32": WIDE,
    "bfloat16 bshd": replace(WIDE, dtype="bfloat16", layout="bshd", window=20),
    "float16 softcap": replace(WIDE, dtype="float16", softcap=1.5, causal=False),
    "fp8": replace(WIDE, dtype="float8_e4m3fn"),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


def fresh_and_seeded(case):
    differentiable = not case.quantised
    read, seeded = (make_inputs(case, "cpu", 5, with_gradients=differentiable) for _ in range(2))
    return read, seeded, FreshInputs(read)


def numbers(inputs):
    return [tensor.detach().float() for tensor in (*inputs.qkv, inputs.d_out)]


def test_inputs_of_a_state_are_those_that_the_calls_read(case):
    read, seeded, fresh = fresh_and_seeded(case)
    for _ in range(4):
        fresh.renew()
        fresh.renew_gradient()
    changed = fresh.changed(seeded, fresh.state)
    for got, wanted, before in zip(numbers(changed), numbers(read), numbers(seeded), strict=True):
        assert torch.equal(got, wanted)
        assert torch.equal(got.abs(), before.abs())
    assert [one.stride() for one in changed.qkv] == [one.stride() for one in read.qkv]
    assert fresh.written(seeded) is None


def test_every_renewal_changes_the_output_and_some_leave_each_tensor(case):
    read, seeded, fresh = fresh_and_seeded(case)
    earlier, stayed = reference(case, seeded, with_gradients=False)["out"], set()
    for index in range(60):
        before = fresh.state.signs
        fresh.renew()
        stayed |= {name for name in "qkv" if fresh.state.signs[name] == before[name]}
        if index < 6:
            now = reference(case, read, with_gradients=False)["out"]
            assert (now - earlier).norm() > 0.1 * earlier.norm()
            earlier = now
    assert stayed == set("qkv")


def test_every_renewal_of_the_gradient_changes_all_gradients_truly(case):
    read, seeded, fresh = fresh_and_seeded(case)
    earlier = reference(case, seeded, with_gradients=True)
    for _ in range(4):
        fresh.renew_gradient()
        now = reference(case, read, with_gradients=True)
        for name in ("dq", "dk", "dv"):
            # Not by signs of its channels alone.
            assert (now[name].abs() - earlier[name].abs()).norm() > 0.1 * earlier[name].norm()
        earlier = now


def test_versions_of_the_tensors_stay_so_that_a_graph_can_be_differentiated_again():
    read, _, fresh = fresh_and_seeded(WIDE)
    before = [tensor._version for tensor in read.qkv]
    fresh.renew()
    assert [tensor._version for tensor in read.qkv] == before


def test_a_relative_has_the_same_output_but_for_signs_and_a_negated_gradient_negated_gradients(case):
    read, seeded, fresh = fresh_and_seeded(case)
    fresh.renew()
    fresh.renew_gradient()
    state = fresh.state
    first = reference(case, fresh.changed(seeded, state), with_gradients=True)
    relative = fresh.relative(state)
    assert relative != state
    fresh.set_forward(relative)
    out = reference(case, read, with_gradients=False)["out"]
    assert not torch.allclose(out, first["out"], atol=1e-2)
    flip_signs(out, relative.signs["v"] ^ state.signs["v"])
    torch.testing.assert_close(out, first["out"])
    fresh.set_forward(state)
    fresh.set_gradient(state, negated=True)
    for name, gradient in reference(case, read, with_gradients=True).items():
        torch.testing.assert_close(gradient if name == "out" else -gradient, first[name])


def test_writing_other_values_and_back_leaves_the_inputs_of_the_seed(case):
    _, seeded, fresh = fresh_and_seeded(case)
    fresh.renew()
    fresh.write(make_inputs(case, "cpu", 6, with_gradients=False))
    assert fresh.written(seeded) == "q"
    fresh.write(seeded)
    assert fresh.written(seeded) is None
    assert fresh.state == State(dict.fromkeys(("q", "k", "v", "d_out", *map(rows_of, ("k", "v", "d_out"))), 0))


def test_a_subclass_of_a_tensor_is_no_input():
    class Lazy(torch.Tensor):
        pass

    read = make_inputs(WIDE, "cpu", 5, with_gradients=False)
    with pytest.raises(TypeError, match=r"^k of the backend's inputs is a Lazy, not a torch.Tensor$"):
        FreshInputs(replace(read, k_bhsd=read.k_bhsd.as_subclass(Lazy)))


def spoiled(kept):
    """The same with one head that is another's."""
    other = kept.clone()
    other[-1, -1] = kept[0, 0]
    return other


@pytest.mark.parametrize("name", ["out", "dq"])
def test_a_probe_tells_a_stale_result_or_head_from_a_right_one(case, name):
    read, seeded, fresh = fresh_and_seeded(case)
    whole = expected(case, seeded, with_gradients=True)
    allowed, usual = allowed_error(whole.tolerances[name].relative), usual_size(whole.tensors[name])
    stale = reference(case, seeded, with_gradients=True)[name]
    probes = []
    for places in draw_places(case, torch.device("cpu"), 10):
        fresh.renew()
        fresh.renew_gradient()
        right = reference(case, read, with_gradients=True)[name]
        for tensor in (right, stale, spoiled(right), torch.full_like(stale, float("nan"))):
            probes.append(Probe(places, places.of(tensor).squeeze(0), fresh.state, 1))
    errors = probe_errors(case, seeded, probes, name, usual)
    last = case.batch * case.q_heads - 1
    for right, kept, head, nan in zip(errors[::4], errors[1::4], errors[2::4], errors[3::4], strict=True):
        assert right[0] < allowed < kept[0] < nan[0] == float("inf")
        assert head[0] > allowed and head[1] == last


def test_sums_of_gradients_tell_those_that_were_kept_and_follow_the_signs_of_channels(case):
    read, seeded, fresh = fresh_and_seeded(case)
    whole = expected(case, seeded, with_gradients=True).tolerances
    relative, summing = {name: bounds.relative for name, bounds in whole.items()}, Summing(case, read, {})
    dice = random.Random(4)
    _, *kept = reference(case, seeded, with_gradients=True).values()
    with_sums_of_weights = case.value_dim >= 16 and case.most_keys >= LEAST_KEYS
    for index in range(10):
        fresh.renew()
        fresh.renew_gradient()
        # Few patterns of rows cancel now and then.
        while not fresh.state.signs[rows_of("d_out")]:
            fresh.renew_gradient()
        out, dq, dk, dv = reference(case, read, with_gradients=True).values()
        # Its sums are right.
        level = dv.mean(2, keepdim=True).expand(dv.shape)
        turned = kept[2].clone()
        flip_signs(turned, fresh.state.signs["d_out"])
        batch = dice.randrange(case.batch)
        for gradients, said in (
            ((dq, dk, dv), None),
            ((dq, dk, turned), "dv of all keys does not sum to d_out"),
            ((dq, dk, torch.full_like(dv, float("nan"))), "dv of all keys does not sum to d_out"),
            ((dq, torch.zeros_like(dk), dv), "dkT k is not qT dq"),
            ((dq, dk.flip(2), dv), "dkT k is not qT dq"),
            ((dq.flip(2), dk, dv), "dkT k is not qT dq"),
            ((dq, dk, level), "dvT v is not d_outT out" if with_sums_of_weights else None),
        ):
            wrong = summing.wrong([summing.taken(batch, index, gradients, out)], relative)
            assert (wrong is None) == (said is None), wrong
            if said:
                assert wrong[0] == index and wrong[1].startswith(f"{said} in head ")


def test_codes_are_judged_with_the_scales_that_they_were_made_with(case):
    read, seeded, fresh = fresh_and_seeded(case)
    first = expected(case, seeded, with_gradients=True)
    relative, names, scales = (
        {name: bounds.relative for name, bounds in first.tolerances.items()},
        ("dq", "dk", "dv"),
        {},
    )
    looks, known = Looks(case, read, scales), TimedPass(names, {})
    for scale in (0.5, 4.0, 1.0):
        fresh.renew()
        fresh.renew_gradient()
        out, *gradients = reference(case, read, with_gradients=True).values()
        # A backend measures them anew for each backward.
        scales.update(dict.fromkeys(names, scale))
        known.count += 1
        looks.at(known, [gradient / scale for gradient in gradients], fresh.state, out)
    assert looks.summing.wrong(known.sums, relative) is None
    errors = probe_errors(case, seeded, known.probes, "dq", usual_size(first.tensors["dq"]))
    assert len(errors) == 3 and max(errors)[0] < allowed_error(relative["dq"])


def test_inputs_that_were_freed_or_put_elsewhere_are_not_read_but_named(case):
    inputs, seeded, fresh = fresh_and_seeded(case)
    inputs.k_bhsd.data = inputs.k_bhsd.detach().clone()
    assert fresh.written(seeded) == "k"
    inputs, seeded, fresh = fresh_and_seeded(case)
    inputs.v_bhsd.untyped_storage().resize_(0)
    assert fresh.written(seeded) == "v"


class LosesDkNowAndThen(Plain):
    """Returns zeros for dk in every second call after the first four."""

    calls = 0

    def backward(self, run):
        self.calls += 1
        dq, dk, dv = run()
        return dq, 0 * dk if self.calls > 4 and self.calls % 2 else dk, dv


def test_calls_whose_dk_alone_is_wrong_are_found_where_all_are_probed(monkeypatch):
    monkeypatch.setattr("attn_exp.worker.judge.looks._SUMS", 10_000)
    entry = Entry("", f"{__name__}.LosesDkNowAndThen", "", ("inaccurate",), None)
    found, _ = outcome(entry, shared_machine())
    assert found.status == "inaccurate"
    assert re.search(
        r"call \d+ (\(.*\) )?was not: (dkT k is not qT dq in head \d of batch row \d|dk is off)", found.reason
    )
