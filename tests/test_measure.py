import re
from dataclasses import replace

import msgspec
import pytest
import torch
from cheats.corpus import SMALL
from cheats.served import PACKED, PARTIAL
from fakes import CASE, FakeGpu, fake_activities, make_request

from attn_exp.backends.package import Unavailable
from attn_exp.core.case.case import DTYPE_BYTES
from attn_exp.core.record.file import read_record, write_record
from attn_exp.core.record.record import Traced
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure, measure_case

CEILINGS = {"copy_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11}


@pytest.fixture
def machine():
    return Machine("cpu", environment={"cpu": "fake"}, ceilings={dtype: dict(CEILINGS) for dtype in DTYPE_BYTES})


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr("attn_exp.timers.loop.BLOCK_US", 2_000.0)
    monkeypatch.setattr("attn_exp.timers.loop.WARM_UP_US", 1_000.0)
    monkeypatch.setattr("attn_exp.worker.machine.device.LOAD_S", 0.1)


def measured(backend, machine, tmp_path, case=CASE, **measuring):
    """The record of a job, after what must hold for any record has been checked."""
    request = make_request(backend, case, **measuring)
    record = measure(request, machine)
    assert record.request is request
    assert bool(record.metrics) == (record.status == "ok")
    assert (record.reason is None) == (record.status == "ok")
    assert record.finished_at >= record.started_at > 0
    assert "\n" not in (record.reason or "")
    if isinstance(record.request.backend.get("gpu"), FakeGpu):
        record = replace(record, request=make_request(case=case, **measuring))
    write_record(record, tmp_path)
    assert read_record(tmp_path) == msgspec.convert(msgspec.to_builtins(record), type(record))
    return record


def raises(what, where):
    return {"_target_": "fakes.Raises", "name": "raises", "what": what, "where": where}


def test_an_honest_backend_is_ok_with_numbers_for_both_passes(machine, tmp_path):
    record = measured("fakes.Honest", machine, tmp_path)
    assert (record.status, record.flags) == ("ok", tuple(sorted(record.flags)))
    assert set(record.passes) == {"forward", "backward"}
    assert set(record.passes["forward"].errors) == {"out"}
    assert set(record.passes["backward"].errors) == {"dq", "dk", "dv"}
    for direction, found in record.passes.items():
        (timing,) = found.timings
        assert (timing.timer, timing.l2, timing.rounds[-1]) == ("cpu", "warm", 2)
        assert record.metrics[f"{direction}/time_us"] > 0
        assert record.metrics[f"{direction}/samples"] == len(timing.times_us)
        assert record.metrics[f"{direction}/first_call_s"] == found.first_call_s > 0
        assert "aten::bmm" in {kernel.name for kernel in found.kernels}
    assert record.ceilings == CEILINGS
    assert record.environment == {
        "cpu": "fake",
        "inputs": "normal(0, 1)",
        "gradients_enabled": True,
        "flops_convention": "exact_mask",
    }
    assert set(record.stages_s) == {
        "unsupported", "ceilings", "inputs", "first_call", "accuracy", "kernels", "timing", "second_opinions",
    }  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_pass_alone_is_measured_alone(machine, tmp_path, direction):
    record = measured("fakes.Honest", machine, tmp_path, passes=(direction,))
    assert record.status == "ok"
    assert set(record.passes) == {direction}
    assert {name.split("/")[0] for name in record.metrics} == {direction}
    assert record.environment["gradients_enabled"] is (direction == "backward")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("fakes.OneNan", "out has values that are not finite"),
        ("fakes.OneInfiniteGradient", "dk has values that are not finite"),
        ("fakes.WrongScale", "out is off by"),
        ("fakes.MaskOffByOne", "out is off by"),
        ("fakes.NoMask", "out is attention without its causal mask: out is off by"),
        ("fakes.OneRowWrong", "out is off by"),
        ("fakes.ZeroGradients", "dq is off by 1 of its norm, allowed is"),
        ("fakes.SwappedGradients", "dq is off by"),
    ],
)
def test_a_wrong_result_is_inaccurate_and_is_never_timed(machine, tmp_path, backend, reason):
    record = measured(backend, machine, tmp_path)
    assert record.status == "inaccurate"
    assert record.reason.startswith(reason)
    assert not any(found.timings for found in record.passes.values())
    assert all(found.errors for found in record.passes.values()), "the evidence is kept"


@pytest.mark.parametrize(
    ("how", "right", "reason"),
    [
        ("not a number", 1, r"on hard values: out has values that are not finite"),
        ("not a number", 3, r"on values of which small weights are all: out has values"),
        ("spoils its inputs", 2, "the backend wrote into its input q"),
        ("no gradients", 1, r"on hard values: d[qkv] is off by 1 of"),
        ("no gradients", 2, r"on values of which small weights are all: d[qkv] is off by 1 of"),
        ("no gradients", 3, "backward: the first call was within tolerance, timed block 1 was not: dq is off by 1 "),
    ],
)
def test_a_backend_that_is_right_in_its_first_calls_alone_is_inaccurate(machine, tmp_path, how, right, reason):
    target = {"_target_": "fakes.RightAtFirst", "name": "fake", "how": how, "right": right}
    # A backward would find out by itself that what it needs was written over.
    passes = {"passes": ("forward",)} if how == "spoils its inputs" else {}
    record = measured(target, machine, tmp_path, **passes)
    assert record.status == "inaccurate"
    assert re.match(reason, record.reason)
    assert record.metrics == {}
    rivals = [make_request({"_target_": "fakes.Honest", "name": "good"}, **passes), make_request(target, **passes)]
    assert [record.status for record in measure_case(rivals, machine)] == ["ok", "inaccurate"]


@pytest.mark.parametrize(("target", "overwritten"), [("OneOutputForAllCalls", True), ("AsWritten", False)])
def test_the_record_says_whose_outputs_the_next_forward_overwrites(machine, tmp_path, target, overwritten):
    record = measured(f"cheats.odd.{target}", machine, tmp_path, SMALL, passes=("forward", "backward"))
    assert (record.status, record.reason) == ("ok", None)
    assert [one.overwritten for one in record.judged if one.call == "hard"] == [overwritten]


@pytest.mark.parametrize(("target", "refused"), [("RefusesOtherStrides", True), ("OutputIsSaved", False)])
def test_the_record_says_whose_backward_refuses_a_gradient_in_the_other_layout(machine, tmp_path, target, refused):
    record = measured(f"cheats.in_a_model.{target}", machine, tmp_path, SMALL, passes=("forward", "backward"))
    assert (record.status, record.reason) == ("ok", None)
    assert [one.strides_refused for one in record.judged if one.call == "hard"] == [refused]


@pytest.mark.parametrize(
    ("target", "case", "reaches"),
    [
        ("ReadsWholePages", PARTIAL, "NaN in slots without a key (it reaches 8 of 8 rows of out)"),
        ("ReadsBehindPackedTokens", PACKED, "NaN in memory behind the last token (it reaches 240 of 240 rows of out)"),
    ],
)
def test_the_record_says_who_reads_memory_that_holds_no_key(machine, tmp_path, target, case, reaches):
    for backend, reads in ((f"cheats.served.{target}", 1.0), ("attn_exp.backends.eager.Eager", 0.0)):
        record = measured(backend, machine, tmp_path, case, passes=("forward",))
        assert (record.status, record.metrics["forward/reads_free_slots"]) == ("ok", reads), record.reason
        assert any(one.call == "free" and (one.inputs == reaches) == bool(reads) for one in record.judged)


@pytest.mark.parametrize("case", [replace(SMALL, latent=True, value_dim=8), replace(SMALL, layout="bshd")])
def test_memory_behind_tensors_that_are_no_packed_tokens_stays_as_it_is(machine, tmp_path, case):
    record = measured("cheats.gaps.HidesWhatIsNoNumber", machine, tmp_path, case, passes=("forward",))
    assert (record.status, record.metrics.get("forward/reads_free_slots")) == ("ok", None), record.reason
    assert "free" not in [one.call for one in record.judged]


@pytest.mark.parametrize("case", [SMALL, replace(SMALL, q_heads=4, kv_heads=2), replace(SMALL, kv_heads=1)])
def test_the_record_says_whose_backward_keeps_the_strides_of_the_first_gradient(machine, tmp_path, case):
    record = measured("cheats.in_a_model.KeepsStrides", machine, tmp_path, case, passes=("forward", "backward"))
    assert (record.status, record.reason) == ("ok", None)
    assert [one.strides_kept for one in record.judged if one.call == "hard"] == [True]


def test_a_mere_oddity_is_a_fact_in_the_record(machine, tmp_path):
    record = measured("cheats.gaps.HidesWhatIsNoNumber", machine, tmp_path, SMALL, passes=("forward",))
    assert (record.status, record.reason) == ("ok", None)
    assert [one.hides_nan for one in record.judged if one.call == "hard"] == [True]


def test_the_attention_of_a_block_is_judged_alone_and_the_next_rival_gets_the_same_values(machine, tmp_path):
    case = replace(CASE, workload="decoder_layer", mlp_dim=64, kv_heads=CASE.q_heads)
    record = measured("fakes.Honest", machine, tmp_path, case)
    assert (record.status, record.reason) == ("ok", None)
    alone = [one for one in record.judged if one.call == "alone"]
    assert [one.inputs for one in alone] == ["normal(0, 1)", "hard values"]
    known = dict(machine.values)
    assert measured("fakes.Honest", machine, tmp_path, case).status == "ok"
    assert machine.values == known


# One key among thousands: less than rounding in bf16 by any norm, and right in every other respect.
@pytest.mark.parametrize(
    ("options", "sizes", "what"),
    [
        ({"lost": 1}, {"q_len": 64, "kv_len": 8192}, "the last key that a query sees were missing"),
        ({"shown": True}, {"q_len": 64, "kv_len": 8192}, "the key after the last that a query sees were visible"),
        ({"lost": 1, "end": "first"}, {"q_len": 64, "kv_len": 8192, "window": 7000}, "the first key that a query"),
        ({"lost": 4}, {"q_len": 8, "kv_len": 32768}, "the last "),
        ({"lost": 4}, {"q_len": 16, "kv_len": 65536, "causal": False}, "the last "),
    ],
)
def test_a_mask_that_is_off_at_its_edge_alone_is_inaccurate_also_in_a_forward(machine, tmp_path, options, sizes, what):
    case = replace(CASE, batch=1, dtype="bfloat16", head_dim=64, value_dim=64, align="bottom_right", **sizes)
    passes = {"passes": ("forward",)}
    assert measured("fakes.Honest", machine, tmp_path, case, **passes).status == "ok"
    wrong = {"_target_": "fakes.EdgeOff", "name": "fake", **options}
    record = measured(wrong, machine, tmp_path, case, **passes)
    assert record.status == "inaccurate"
    assert f"out is as if {what}" in record.reason


def test_a_wrong_forward_is_inaccurate_also_where_the_backward_alone_is_measured(machine, tmp_path):
    assert measured("fakes.MaskOffByOne", machine, tmp_path, passes=("backward",)).status == "inaccurate"


def test_gradients_are_not_judged_where_none_are_asked_for(machine, tmp_path):
    assert measured("fakes.ZeroGradients", machine, tmp_path, passes=("forward",)).status == "ok"
    assert measured("fakes.ForwardOnly", machine, tmp_path, passes=("forward",)).status == "ok"


def test_other_kernels_than_claimed_are_a_wrong_kernel_with_what_ran(machine, tmp_path):
    record = measured("fakes.Liar", machine, tmp_path)
    assert record.status == "wrong_kernel"
    assert record.reason.startswith("forward: fake claims /flash_(fwd|bwd)/, but aten::")
    assert record.passes["forward"].kernels
    assert not record.passes["forward"].timings
    record = measured("fakes.LiarInBackward", machine, tmp_path)
    assert (record.status, record.reason.split(":")[0]) == ("wrong_kernel", "backward")
    assert record.passes["forward"].timings, "what was measured before is evidence"


def test_a_claimed_operator_is_found_behind_longer_ones(machine, tmp_path):
    assert measured("fakes.ManyOperators", machine, tmp_path, passes=("forward",)).status == "ok"


def test_unsupported_is_said_before_anything_is_prepared(machine, tmp_path):
    record = measured("fakes.Refuses", machine, tmp_path)
    assert (record.status, record.reason) == ("unsupported", "no kernel for head_dim 8 on cpu")
    assert record.passes == {}


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("Unavailable", "unavailable", "pip install nothing"),
        ("ImportError", "unavailable", "a package is missing: No module named 'nothing'"),
        ("MemoryError", "out_of_memory", "MemoryError"),
        ("OutOfMemoryError", "out_of_memory", "OutOfMemoryError: CUDA out of memory."),
        ("cpu allocator", "out_of_memory", "RuntimeError: [enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator"),
        ("triton", "unsupported", "a kernel needs 262144 of a resource of which this GPU has 232448"),
        ("inductor", "unsupported", "a kernel needs 245760 of a resource of which this GPU has 232448"),
        ("RuntimeError", "error", "RuntimeError: CUDA error: unspecified"),
        ("AssertionError", "error", "AssertionError"),
    ],
)
@pytest.mark.parametrize("where", ["prepare", "backward", "later"])
def test_whatever_is_raised_wherever_becomes_a_status(machine, tmp_path, what, status, reason, where):
    record = measured(raises(what, where), machine, tmp_path)
    assert record.status == status
    assert record.reason.startswith(reason)


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [
        ("no_such_package.Attention", "unavailable", "cannot import backend._target_=no_such_package.Attention"),
        ("fakes.Raises", "unavailable", "fakes.Raises does not take the options"),
        ("fakes.WrongLayout", "inaccurate", "forward: the shape of out is (1, 16, 2, 8), not (1, 2, 16, 8)"),
        ("fakes.TwoGradients", "inaccurate", "the backward returned 2, not the 3 gradients dq, dk, dv"),
        ("fakes.ForwardOnly", "error", "NotImplementedError: no backward"),
    ],
)
def test_a_backend_that_breaks_the_contract_is_told_so(machine, tmp_path, backend, status, reason):
    record = measured(backend, machine, tmp_path)
    assert record.status == status
    assert record.reason.startswith(reason)


def test_an_allocation_that_no_machine_has_is_out_of_memory(machine, tmp_path):
    assert measured("fakes.Greedy", machine, tmp_path).status == "out_of_memory"


@pytest.mark.parametrize(("others", "final"), [(1_150_000_000, False), (900_000_000, True)])
def test_a_lack_of_memory_that_others_cause_is_not_final(machine, tmp_path, monkeypatch, others, final):
    monkeypatch.setattr("attn_exp.worker.attempt.memory_of_others", lambda: (others, 64_000_000_000))
    record = measured("fakes.Greedy", machine, tmp_path)
    assert (record.status, record.final) == ("out_of_memory", final)
    assert record.reason.endswith("; 1.1 of 64 GB were taken by others") != final


def test_a_bad_rival_leaves_the_machine_fit_for_a_good_one(machine, tmp_path):
    for backend in ("fakes.OneNan", "fakes.Liar", raises("RuntimeError", "later"), raises("MemoryError", "backward")):
        measured(backend, machine, tmp_path)
        assert measured("fakes.Honest", machine, tmp_path).status == "ok"


# A GPU whose clock is the fake's and whose tensors are the CPU's: the GPU's half of measure() without a GPU.
GPU_CASE = replace(CASE, q_heads=4, kv_heads=4, q_len=64, kv_len=64, head_dim=32, value_dim=32)
ON_GPU = {"timer": "device", "also": ("kernel", "event"), "passes": ("forward",)}


class Nvml:
    def __init__(self):
        self.capped_ns = 0

    def read(self):
        self.capped_ns += 1000
        return {"held_back_ns": {"power": self.capped_ns}, "reasons": ["sw_power_cap"]}


@pytest.fixture
def gpu_machine(machine, monkeypatch):
    machine.gpu = FakeGpu()
    machine.environment["gpu"] = "NVIDIA H200"
    traced(monkeypatch, machine.gpu, ("flash_fwd", 11.0), ("combine", 0.5))
    return machine


def traced(monkeypatch, gpu, *kernels, **how):
    """A profiler that sees `kernels` in every call on the fake GPU."""
    recorder = fake_activities(gpu, kernels, **how) if kernels else fake_activities(gpu)
    monkeypatch.setattr("attn_exp.timers.trace.activities", recorder)


def on_gpu(machine, gpu_us, host_us=0.0, claim=None):
    return {"_target_": "fakes.OnFakeGpu", "name": "g", "gpu": machine.gpu, "gpu_us": gpu_us, "host_us": host_us,
            "claim": claim}  # fmt: skip


def test_on_a_gpu_the_device_timer_ranks_and_the_others_are_second_opinions(gpu_machine, tmp_path):
    record = measured(on_gpu(gpu_machine, 12.0, host_us=50.0, claim="flash"), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert (record.status, record.flags) == ("ok", ("launch_bound",))
    assert [timing.timer for timing in record.passes["forward"].timings] == ["device", "kernel", "event"]
    assert record.metrics["forward/time_us"] == pytest.approx(12.0)
    assert record.metrics["forward/kernel_time_us"] == pytest.approx(11.5)
    assert record.metrics["forward/event_time_us"] > 30.0
    assert record.passes["forward"].activity == Traced(sum_us=11.5, union_us=11.5, span_us=11.5, streams=(7,))
    assert record.passes["forward"].timings[1].notes == {"union_us": 11.5, "span_us": 11.5, "streams": 1.0}


def test_the_event_timer_has_nothing_to_add_if_nothing_was_blocked(gpu_machine, tmp_path, monkeypatch):
    traced(monkeypatch, gpu_machine.gpu, ("flash_fwd", 399.0))
    record = measured(on_gpu(gpu_machine, 400.0), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert [timing.timer for timing in record.passes["forward"].timings] == ["device", "kernel"]
    assert record.flags == ()


def test_a_kernel_time_that_contradicts_the_device_timer_is_a_flag_and_said(gpu_machine, tmp_path):
    record = measured(on_gpu(gpu_machine, 400.0), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert (record.status, record.flags) == ("ok", ("timers_disagree",))
    (pair,) = record.passes["forward"].disagreements
    assert (pair.one, pair.other, pair.one_us, pair.other_us) == ("device", "kernel", 400.0, 11.5)


@pytest.mark.parametrize(
    ("gpu_us", "reason"), [(0.01, "forward: 13.1 TB/s is above"), (0.0005, "forward: 2,130 TFLOP/s")]
)
def test_a_time_that_no_such_chip_can_reach_is_implausible(gpu_machine, tmp_path, gpu_us, reason):
    record = measured(on_gpu(gpu_machine, gpu_us), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert record.status == "implausible"
    assert record.reason.startswith(reason)
    assert record.passes["forward"].timings, "the samples are the evidence"


def test_a_time_below_the_machines_product_is_implausible_unless_it_is_busy_or_a_faster_one_is_found(
    machine, tmp_path, monkeypatch
):
    for product, others, status in ((1e3, set(), "implausible"), (1e3, {"busy_host"}, "ok"), (1e15, set(), "ok")):
        machine.ceilings["float32"] = CEILINGS | {"matmul_flops_per_s": 1e3}
        monkeypatch.setattr("attn_exp.worker.limits.fastest_product", lambda *_, product=product: product)
        monkeypatch.setattr("attn_exp.worker.limits.telemetry_flags", lambda *_, others=others: others)
        record = measured("fakes.Honest", machine, tmp_path, passes=("forward",))
        assert record.status == status, record.reason
        assert others <= set(record.flags)
        if status != "ok":
            assert "is above 1.5 times this machine's matrix product, measured at 1e-09 TFLOP/s" in record.reason
            assert record.passes["forward"].timings, "the samples are the evidence"


@pytest.mark.parametrize(
    ("gpu_us", "capped", "status"),
    [(200.0, False, "ok"), (170.0, False, "implausible"), (170.0, True, "ok"), (140.0, True, "implausible")],
)
def test_a_device_time_below_the_kernels_own_is_implausible(gpu_machine, tmp_path, monkeypatch, gpu_us, capped, status):
    # A call that waits while it is traced alone, and not while it is timed: its trace leaves nothing behind.
    traced(monkeypatch, gpu_machine.gpu, ("half", 100.0), ("half", 100.0))
    gpu_machine.state = Nvml() if capped else None
    record = measured(on_gpu(gpu_machine, gpu_us), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert record.status == status, record.reason
    if status != "ok":
        assert record.reason == (
            f"forward: device has {gpu_us:,.1f} us where the call's kernels run for 200.0 us: the stream that makes "
            "the call does not wait for all of its work"
        )


def test_the_wrong_kernel_on_a_gpu_is_told_by_its_name(gpu_machine, tmp_path):
    record = measured(on_gpu(gpu_machine, 12.0, claim="cudnn"), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert (record.status, record.reason) == ("wrong_kernel", "forward: g claims /cudnn/, but flash_fwd, combine ran")


def test_lost_profiler_records_are_flagged_and_no_excuse(gpu_machine, tmp_path, monkeypatch):
    traced(monkeypatch, gpu_machine.gpu, ("flash_fwd", 11.0), ("combine", 0.5), lost=[0])
    for claim, status in ((None, "ok"), ("flash", "ok"), ("combine", "wrong_kernel"), ("cudnn", "wrong_kernel")):
        record = measured(on_gpu(gpu_machine, 12.0, claim=claim), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
        assert (record.status, record.flags) == (status, ("profiler_lossy",)), claim
        assert record.passes["forward"].activity is None


def test_a_claim_that_covers_little_of_the_time_is_the_wrong_kernel(gpu_machine, tmp_path):
    def ended(claim, **own):
        config = on_gpu(gpu_machine, 12.0, claim=claim) | {"own": own}
        return measured(config, gpu_machine, tmp_path, GPU_CASE, **ON_GPU)

    # Of the kernels' 11.5 us, flash_fwd takes 11 and combine 0.5.
    for claim, needed in (("flash", 0.5), ("flash_fwd|combine", 1.0), ("combine", 0.04), ("combine", 0.0)):
        assert ended(claim, claimed_share=needed).status == "ok"
    for claim, needed, share in (("combine", 0.5, "4.3"), ("combine", 0.05, "4.3"), ("flash", 0.96, "95.7")):
        record = ended(claim, claimed_share=needed)
        said = f"kernels of that name took {share}% of the time instead of {needed:.0%}"
        assert (record.status, said in record.reason) == ("wrong_kernel", True), record.reason
    # No share declared is half.
    assert ended("flash").status == "ok"
    assert ended("combine").reason == (
        "forward: g claims /combine/, but flash_fwd, combine ran, and kernels of that name took 4.3% of the time "
        "instead of 50%"
    )


def test_calls_that_launch_different_kernels_are_checked_and_said_so(gpu_machine, tmp_path, monkeypatch):
    calls = (("flash_fwd", 11.0),), (("copy", 11.0),)
    monkeypatch.setattr("attn_exp.timers.trace.activities", fake_activities(gpu_machine.gpu, *calls))
    record = measured(on_gpu(gpu_machine, 12.0), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert (record.status, record.flags) == ("ok", ())
    assert record.passes["forward"].activity.calls_differ
    assert [kernel.count for kernel in record.passes["forward"].kernels] == pytest.approx([2 / 3, 1 / 3])
    record = measured(on_gpu(gpu_machine, 12.0, claim="cudnn"), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert record.status == "wrong_kernel"
    idle = fake_activities(gpu_machine.gpu, calls[0], ())
    monkeypatch.setattr("attn_exp.timers.trace.activities", idle)
    record = measured(on_gpu(gpu_machine, 12.0), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert (record.status, record.reason) == ("wrong_kernel", "forward: g ran no kernel at all in 1 of 3 calls")


@pytest.mark.parametrize(("joined", "status"), [(True, "ok"), (False, "implausible")])
def test_work_on_a_side_stream_counts_if_the_calls_stream_waits_for_it(
    gpu_machine, tmp_path, monkeypatch, joined, status
):
    traced(monkeypatch, gpu_machine.gpu, ("half", 100.0), ("half", 120.0, 20, 5.0), joined=joined)
    record = measured(on_gpu(gpu_machine, 126.0), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert record.status == status, record.reason
    activity = record.passes["forward"].activity
    assert (activity.sum_us, activity.streams) == (220.0, (7, 20))
    if status == "implausible":
        assert record.reason == (
            "forward: the stream that makes the call does not wait for 25.0 us of its work, on stream 20"
        )


@pytest.mark.parametrize("claim", [None, "flash"])
def test_a_call_that_launches_nothing_on_a_gpu_is_a_wrong_kernel_whatever_is_claimed(
    gpu_machine, tmp_path, monkeypatch, claim
):
    traced(monkeypatch, gpu_machine.gpu)
    record = measured(on_gpu(gpu_machine, 12.0, claim=claim), gpu_machine, tmp_path, GPU_CASE, **ON_GPU)
    assert (record.status, record.reason) == ("wrong_kernel", "forward: g ran no kernel at all")


def test_telemetry_is_read_before_and_after_every_pass_and_a_power_cap_flagged(gpu_machine, tmp_path, monkeypatch):
    traced(monkeypatch, gpu_machine.gpu, ("flash_fwd", 399.0))
    gpu_machine.state = Nvml()
    both = ON_GPU | {"passes": ("forward", "backward")}
    record = measured(on_gpu(gpu_machine, 400.0), gpu_machine, tmp_path, GPU_CASE, **both)
    assert [reading["held_back_ns"]["power"] for reading in record.telemetry] == [1000, 2000, 3000, 4000]
    assert (record.status, record.reason) == ("ok", None)
    assert record.flags == ("power_capped",)


def test_a_cuda_machine_without_cuda_says_what_to_do():
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    with pytest.raises(Unavailable, match=r"sees no CUDA device: .* or set device=cpu"):
        Machine.open("cuda")


def test_a_rival_that_fails_amid_the_rounds_ends_alone_and_the_others_are_measured(machine, tmp_path):
    requests = [
        make_request({"_target_": target, "name": name})
        for name, target in (("good", "fakes.Honest"), ("bad", "fakes.TiresOut"), ("fine", "fakes.Honest"))
    ]
    good, bad, fine = measure_case(requests, machine)
    assert (good.status, fine.status) == ("ok", "ok")
    assert (bad.status, bad.reason) == ("error", "RuntimeError: no more")
    assert bad.metrics == {}
    paired = [record.passes["forward"].timings[0].rounds for record in (good, fine)]
    assert set(paired[0]) == set(paired[1])
