"""Bits of results over calls, positions, batch sizes and kv splits: real backends, and ones that are unsteady."""

import itertools
from dataclasses import replace

import pytest
import unsteady
from fakes import CASE, make_request
from test_measure import CEILINGS, measured, short_rounds  # noqa: F401  (used in every test)

from attn_exp.core.case.case import DTYPE_BYTES
from attn_exp.core.record.checked import Bitwise
from attn_exp.worker import determinism
from attn_exp.worker import measure as measuring
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure_case

# Sums of 64 keys round differently in another order.
LONG = replace(CASE, batch=2, q_len=64, kv_len=64, causal=False)
FORWARD = ("forward",)


@pytest.fixture
def machine():
    return Machine("cpu", environment={"cpu": "fake"}, ceilings={dtype: dict(CEILINGS) for dtype in DTYPE_BYTES})


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """`unsteady.CALLS` counts from when bits begin to be compared."""

    def begin(*arguments):
        unsteady.CALLS[0] = 0
        try:
            determinism.measure_determinism(*arguments)
        finally:
            unsteady.CALLS[0] = None

    monkeypatch.setattr(measuring, "measure_determinism", begin)


def found(backend, machine, tmp_path, case=CASE, passes=FORWARD):
    """What an `ok` record says of the bits of its passes."""
    record = measured(backend, machine, tmp_path, case, determinism=True, passes=passes)
    assert (record.status, record.reason) == ("ok", None)
    assert record.stages_s["determinism"] > 0
    return {name: one.bitwise for name, one in record.passes.items()}


def test_nothing_is_compared_unless_it_is_asked_for(machine, tmp_path):
    record = measured("fakes.Honest", machine, tmp_path)
    assert [one.bitwise for one in record.passes.values()] == [{}, {}]
    assert "determinism" not in record.stages_s
    assert not {name for name in record.metrics if "deterministic" in name or "invariant" in name}


@pytest.mark.parametrize(("target", "name"), [("sdpa.Math", "math"), ("sdpa.Flash", "flash")])
def test_pytorchs_backends_repeat_their_bits_on_a_cpu(machine, tmp_path, target, name):
    backend, passes = {"_target_": f"attn_exp.backends.{target}", "name": name}, ("forward", "backward", "step")
    record = measured(backend, machine, tmp_path, LONG, determinism=True, passes=passes)
    assert (record.status, record.reason) == ("ok", None)
    for direction in passes:
        facts = record.passes[direction].bitwise
        assert facts["calls"] == Bitwise(same=True, compared=99)
        assert list(facts) == ["calls", "positions", "batch_sizes", *(["phases"] if direction == "forward" else [])]
        assert (facts["positions"].compared, facts["batch_sizes"].compared) == (1, 2)
        assert record.metrics[f"{direction}/deterministic"] == 1.0
        # By the test's own means, with the same threads: whether one row alone has the bits that it has among two.
        invariant = facts["positions"].same and facts["batch_sizes"].same
        assert record.metrics[f"{direction}/batch_invariant"] == float(invariant)


def test_sums_in_the_order_of_chance_differ_between_calls(machine, tmp_path):
    record = measured("unsteady.Atomics", machine, tmp_path, LONG, determinism=True, passes=FORWARD)
    facts = record.passes["forward"].bitwise
    assert facts["calls"].same is False
    first = facts["calls"].first
    assert (first.tensor, first.result.split()[0], first.elements_of) == ("out", "call", 2 * 2 * 64 * 8)
    assert 0 < first.max_abs < 1e-5
    # Which of 24 orders the first call took, few others take.
    assert facts["calls"].differing > 50
    assert facts["positions"] == facts["batch_sizes"]
    assert facts["positions"] == Bitwise(same=False, why="calls on the same inputs differ already")
    assert (record.metrics["forward/deterministic"], record.metrics["forward/batch_invariant"]) == (0.0, 0.0)


def test_a_split_that_depends_on_the_batch_shows_in_other_sizes_only(machine, tmp_path):
    facts = found("unsteady.SplitByBatch", machine, tmp_path, LONG)["forward"]
    assert (facts["calls"].same, facts["positions"].same, facts["batch_sizes"].same) == (True, True, False)
    # One row, and not four.
    assert (facts["batch_sizes"].compared, facts["batch_sizes"].differing) == (2, 1)
    assert facts["batch_sizes"].first.result in ("row 0 in a batch of 1", "row 1 in a batch of 1")


def test_decoding_that_splits_its_keys_shows_against_the_prefill_of_the_same_tokens(machine, tmp_path):
    facts = found("unsteady.SplitByQueries", machine, tmp_path, LONG)["forward"]
    assert [facts[way].same for way in ("calls", "positions", "batch_sizes", "phases")] == [True, True, True, False]
    assert (facts["phases"].compared, facts["phases"].differing) == (2, 1)
    assert facts["phases"].first.result == "the last query alone"


def test_a_row_that_depends_on_its_position_shows(machine, tmp_path):
    case = replace(LONG, batch=3)
    facts = found("unsteady.FirstRowOtherwise", machine, tmp_path, case)["forward"]
    assert (facts["calls"].same, facts["positions"].same) == (True, False)
    assert (facts["positions"].compared, facts["positions"].differing) == (2, 2)
    assert facts["positions"].first.result == "row 1 at position 0"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("OneBitInCall37", "call 37: out[0, 1, 2, 3] is "),
        ("MinusZeroInCall37", "call 37: out[0, 0, 0, 0] is -0 (0x80000000) and not 0 (0x00000000); 1 of 256"),
        ("OtherNanInCall37", "call 37: out[0, 0, 0, 0] is nan (0x7fc00002) and not nan (0x7fc00001); 1 of 256"),
    ],
)
def test_one_bit_in_one_call_of_a_hundred_is_found(machine, tmp_path, target, told):
    fact = found(f"unsteady.{target}", machine, tmp_path)["forward"]["calls"]
    assert (fact.same, fact.compared, fact.differing) == (False, 99, 1)
    assert str(fact.first).startswith(told)
    assert (fact.first.max_abs is None) == (target == "OtherNanInCall37")


def test_a_nan_in_one_call_of_a_hundred_makes_the_job_inaccurate(machine, tmp_path):
    record = measured("unsteady.NanInCall37", machine, tmp_path, determinism=True, passes=FORWARD)
    assert record.status == "inaccurate"
    assert record.reason == "forward: call 37 has values in out that are not finite"


def test_a_call_that_raises_ends_the_job_and_is_named(machine, tmp_path):
    record = measured("unsteady.RaisesInCall50", machine, tmp_path, determinism=True, passes=FORWARD)
    assert record.status == "error"
    assert record.reason == "forward, call 50 of 100 on the same inputs: RuntimeError: the fiftieth call"
    assert record.passes["forward"].timings


def test_without_memory_it_is_not_known(machine, tmp_path):
    record = measured("unsteady.NoMemoryInCall50", machine, tmp_path, LONG, determinism=True, passes=FORWARD)
    assert record.status == "ok"
    fact = record.passes["forward"].bitwise["calls"]
    assert (fact.same, fact.compared) == (None, 48)
    assert fact.why.startswith("forward, call 50 of 100 on the same inputs: OutOfMemoryError")
    assert "forward/deterministic" not in record.metrics


@pytest.mark.parametrize(("late_after", "compared"), [(0, 0), (5, 5)])
def test_the_time_is_limited_and_less_than_all_calls_prove_nothing(
    machine, tmp_path, monkeypatch, late_after, compared
):
    looks = itertools.count()
    monkeypatch.setattr(determinism.time, "monotonic", lambda: 1e9 * (next(looks) > late_after))
    fact = found("fakes.Honest", machine, tmp_path)["forward"]["calls"]
    assert fact == Bitwise(same=None, compared=compared, why="120 s were over")


def test_a_promise_that_is_not_kept_has_a_status_of_its_own(machine, tmp_path):
    backend = {"_target_": "unsteady.GradientsByChance", "name": "chance"}
    both = ("forward", "backward")
    record = measured(backend, machine, tmp_path, determinism=True, passes=both)
    assert (record.status, record.metrics["backward/deterministic"]) == ("ok", 0.0)
    assert record.metrics["forward/deterministic"] == 1.0
    promised = measured(backend | {"deterministic": True}, machine, tmp_path, determinism=True, passes=both)
    assert promised.status == "nondeterministic"
    assert promised.reason.startswith("backward: deterministic=true, and call ")
    assert "dk[0, 0, 1, 2]" in promised.reason
    assert promised.passes["backward"].bitwise["calls"].same is False
    # Nobody looked.
    assert measured(backend | {"deterministic": True}, machine, tmp_path, passes=both).status == "ok"


def test_rivals_of_a_duel_are_compared_with_themselves(machine):
    requests = [
        replace(make_request(target, LONG, determinism=True, passes=FORWARD), job=target)
        for target in ("unsteady.Chunked", "unsteady.Atomics")
    ]
    facts = [one.passes["forward"].bitwise["calls"].same for one in measure_case(requests, machine)]
    assert facts == [True, False]


def test_requests_with_more_keys_than_queries_change_places(machine, tmp_path):
    sizes = {"lengths": (16, 8, 0, 8), "kv_lengths": (32, 24, 8, 40), "q_len": 32, "kv_len": 104}
    case = replace(CASE, **sizes, head_dim=32, value_dim=32)
    facts = found("fakes.Honest", machine, tmp_path, case, passes=("forward", "backward"))
    for of_pass in facts.values():
        assert (of_pass["calls"].same, of_pass["positions"].compared, of_pass["batch_sizes"].compared) == (True, 2, 2)


def test_only_the_calls_of_a_block_are_compared(machine, tmp_path):
    case = replace(CASE, workload="decoder_layer", mlp_dim=64, kv_heads=CASE.q_heads)
    assert list(found("fakes.Honest", machine, tmp_path, case)["forward"]) == ["calls"]
