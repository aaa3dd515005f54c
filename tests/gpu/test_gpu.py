import ctypes
import json
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cli import left_behind, run, runs
from fakes import make_request

from attn_exp.attention.error import tensor_error
from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.reference import reference
from attn_exp.backends.base import load_backend
from attn_exp.core.case.case import Case
from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder
from attn_exp.timers import make_timer
from attn_exp.timers.card import Card
from attn_exp.timers.loop import Entry, sample, sample_turns
from attn_exp.timers.stopping import StoppingRule
from attn_exp.worker.machine.settings import OwnState, Settings
from attn_exp.worker.measure import measure

pytestmark = pytest.mark.gpu
ALONE = pytest.mark.alone

RULE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=15, budget_s=0.5)
SDPA = {name: f"attn_exp.backends.sdpa.{name.capitalize()}" for name in ("flash", "efficient", "cudnn", "math")}
SDPA |= {"auto": "attn_exp.backends.sdpa.Sdpa", "eager": "attn_exp.backends.eager.Eager"}


def gpu_case(batch=2, heads=4, kv_heads=None, q_len=512, kv_len=None, dim=64, dtype="bfloat16", causal=False):
    kv_heads, kv_len = kv_heads or heads, kv_len or q_len
    sizes = {"batch": batch, "q_heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    return Case(**sizes, head_dim=dim, value_dim=dim, dtype=dtype, causal=causal, align="top_left")


def gpu_request(target, case, name="fake", **measuring):
    options = {"timer": "device", "also": ("kernel", "event"), "budget_s": 0.02}
    request = make_request({"_target_": target, "name": name}, case, **options | measuring)
    return replace(request, device="cuda")


@ALONE
@pytest.mark.parametrize("duration_us", [50.0, 500.0, 5000.0])
def test_the_device_timer_measures_a_known_duration(machine, duration_us):
    cycles = int(duration_us * 1980)
    calls = [partial(torch.cuda._sleep, cycles), partial(torch.cuda._sleep, cycles // 2)]
    entries = [Entry(make_timer("device", machine.gpu), call) for call in calls]
    longer, shorter = (statistics.median(timing.times_us) for timing in sample_turns(entries, RULE))
    # The difference is free of the event's own floor.
    assert longer - shorter == pytest.approx(duration_us / 2, rel=0.02, abs=1.0)


@ALONE
def test_a_busy_host_moves_the_event_timer_and_not_the_device_timer(machine):
    x = torch.randn(1 << 26, device="cuda")

    def late() -> None:
        began = machine.gpu.now_us()
        x.mul_(1.0)
        while machine.gpu.now_us() - began < 1000:
            pass
        x.mul_(1.0)

    def prompt() -> None:
        x.mul_(1.0)
        x.mul_(1.0)

    def median(name, call):
        return statistics.median(sample(make_timer(name, machine.gpu), call, RULE).times_us)

    assert median("event", late) > 900
    assert median("device", late) == pytest.approx(median("device", prompt), rel=0.03, abs=0.3)


@ALONE
def test_the_tuner_of_triton_sees_the_gpu_where_triton_s_own_sees_the_host(machine):
    from triton.testing import do_bench

    from attn_exp.kernels.tuning import bench

    x = torch.zeros(1024, device="cuda")

    def late() -> None:
        began = machine.gpu.now_us()
        while machine.gpu.now_us() - began < 100:
            pass
        x.add_(1.0)

    (ours,) = bench(late, (0.5,))
    assert 0.001 < ours < 0.05 < do_bench(late, quantiles=(0.5,))


@ALONE
@pytest.mark.parametrize(("batch", "length"), [(16, 512), (2, 8192)])
def test_device_kernel_and_graph_agree_side_by_side(machine, batch, length):
    case = gpu_case(batch=batch, heads=16, q_len=length, dim=128)
    inputs = make_inputs(case, "cuda", 1, with_gradients=False)
    calls = load_backend({"_target_": SDPA["flash"], "name": "flash"}).prepare(case, inputs)
    entries = [
        Entry(make_timer(name, machine.gpu), calls.forward, calls.scope) for name in ("device", "kernel", "graph")
    ]
    # A profiler's session begins with a pause, after which a GPU at its power limit is faster: all rest.
    timings = sample_turns(entries, RULE, card=Card(rest_s=0.1))
    device, kernel, graph = (statistics.median(timing.times_us) for timing in timings)
    # A GPU at its power limit swings by percent, and of rivals the lighter ones before a call give it a faster clock.
    limit = 2 + 0.03 * device
    assert max(abs(device - kernel), abs(device - graph)) <= limit, (device, kernel, graph)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("backend", list(SDPA))
def test_every_backend_is_right_and_runs_the_kernels_that_it_claims(machine, backend, dtype):
    for dim, causal, kv_heads in ((64, True, 4), (128, False, 4), (128, True, 2)):
        case = gpu_case(dim=dim, causal=causal, kv_heads=kv_heads, dtype=dtype)
        record = measure(gpu_request(SDPA[backend], case, backend), machine)
        assert record.status in ("ok", "unsupported"), (case.label(), record.status, record.reason)
        if record.status == "unsupported":
            assert len(record.reason or "") > 20, record.reason
            assert dtype == "float32" or kv_heads == 2, record.reason
            continue
        for direction in ("forward", "backward"):
            measured = record.passes[direction]
            assert measured.kernels
            assert [timing.timer for timing in measured.timings][:2] == ["device", "kernel"]
            assert record.metrics[f"{direction}/flops_of_peak"] < 1
            assert record.metrics[f"{direction}/peak_memory_bytes"] > 0
        assert len(record.telemetry) == 4
        assert {"sm_clock_mhz", "power_w"} <= set(record.telemetry[0])


@ALONE
@pytest.mark.parametrize("timer", ["device", "graph"])
@pytest.mark.parametrize("backend", ["flash", "cudnn", "eager"])
def test_a_step_takes_as_long_as_its_halves(machine, backend, timer):
    passes = ("forward", "backward", "step")
    case = gpu_case(batch=4, heads=16, q_len=2048, dim=128)
    options = {"timer": timer, "also": (), "passes": passes, "budget_s": 0.2}
    record = measure(gpu_request(SDPA[backend], case, backend, **options), machine)
    assert (record.status, tuple(record.passes)) == ("ok", passes), record.reason
    forward, backward, step = (record.metrics[f"{name}/time_us"] for name in passes)
    # The halves begin with cold caches each, and a step has the host between them.
    assert 0.9 * (forward + backward) <= step <= 1.15 * (forward + backward) + 20


@ALONE
@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("faulty.MislabelledFlash", "wrong_kernel", "flash_fwd"),
        ("faulty.ComputesNothing", "inaccurate", "on hard values"),
        ("faulty.TakesAllMemory", "out_of_memory", "OutOfMemoryError"),
        ("fakes.OneNan", "inaccurate", "not finite"),
        ("fakes.ZeroGradients", "inaccurate", "dq"),
    ],
)
def test_an_error_on_a_gpu_is_a_status_without_numbers(machine, target, status, words):
    record = measure(gpu_request(target, gpu_case(q_len=2048, heads=16, dim=128)), machine)
    assert record.status == status, record.reason
    assert words in (record.reason or "")
    assert record.metrics == {}


@ALONE
def test_lines_of_the_l2_cache_that_a_backend_made_persistent_are_given_back(machine):
    driver, limit = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    assert driver.cuCtxSetLimit(6, ctypes.c_size_t(10 << 20)) == 0
    with OwnState(Settings.now()).inside():
        assert driver.cuCtxGetLimit(ctypes.byref(limit), 6) == 0
    assert limit.value == 0


@ALONE
def test_a_small_call_is_launch_bound_and_says_so(machine):
    record = measure(gpu_request(SDPA["flash"], gpu_case(batch=1, q_len=128), "flash"), machine)
    assert record.status == "ok"
    assert "launch_bound" in record.flags
    assert record.metrics["backward/event_time_us"] > 1.5 * record.metrics["backward/time_us"]


@ALONE
def test_the_reference_of_the_largest_case_fits_and_judges(machine):
    case = gpu_case(batch=16, heads=16, q_len=8192, dim=128, causal=True)
    machine.reference = None
    inputs = make_inputs(case, "cuda", 2, with_gradients=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    known = reference(case, inputs, with_gradients=True)
    assert torch.cuda.max_memory_allocated() - before < 24 << 30
    calls = load_backend({"_target_": SDPA["cudnn"], "name": "cudnn"}).prepare(case, inputs)
    with calls.scope():
        out = calls.forward()
        found = dict(zip(("dq", "dk", "dv"), calls.backward(out)(), strict=True)) | {"out": out}
    for name, tensor in found.items():
        assert tensor_error(tensor, known[name]).relative < 0.006
    spoiled = found["dk"].clone()
    spoiled[15, 15, 0] = 0
    assert tensor_error(spoiled, known["dk"]).worst_row > 0.5


@ALONE
def test_a_poisoned_worker_is_replaced_and_the_sweep_goes_on(tmp_path):
    conf = tmp_path / "conf" / "backend"
    conf.mkdir(parents=True)
    for name in ("Asserts", "TakesAllMemory"):
        (conf / f"{name.lower()}.yaml").write_text(f"# a test\n_target_: faulty.{name}\nname: {name.lower()}\n")
    (tmp_path / "faulty.py").write_text((Path(__file__).parent / "faulty.py").read_text())
    done = run(
        *("-m", "backend=flash,asserts,cudnn,takesallmemory,efficient", "device=cuda", "sweep=p", "batch=1"),
        *("seq_len=256", "stopping.budget_s=0.05", f"hydra.searchpath=[file://{tmp_path / 'conf'}]"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = {record.request.backend["name"]: record for record in read_folder(tmp_path / "multirun" / "p").records()}
    assert all(isinstance(record, Record) for record in found.values())
    statuses = {name: record.status for name, record in found.items()}
    expected = {"flash": "ok", "cudnn": "ok", "efficient": "ok", "asserts": "error", "takesallmemory": "out_of_memory"}
    assert statuses == expected, {name: record.reason for name, record in found.items()}
    assert left_behind(tmp_path) == []
    assert {status for _, status, _ in runs(tmp_path)} == {"FINISHED", "FAILED"}


@ALONE
def test_every_timer_can_rank_both_passes(tmp_path):
    timers = {"kernel", "event", "graph", "wall", "dispatch"}
    done = run(
        *("-m", f"timer={','.join(timers)}", "backend=cudnn", "seq_len=512", "tracker=none", "sweep=k"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = list(read_folder(tmp_path / "multirun" / "k").records())
    assert {record.request.measuring.timer for record in found} == timers
    for record in found:
        assert record.status == "ok", record.reason
        for measured in record.passes.values():
            assert measured.timings[0].timer == record.request.measuring.timer


@ALONE
def test_a_duel_of_rivals_on_a_gpu_says_who_is_faster(tmp_path):
    done = run("duel", "a=math", "b=cudnn", "seq_len=512", "tracker=none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(next(tmp_path.glob("multirun/duel-*/duel.json")).read_text())
    assert {direction: found[0]["verdict"] for direction, found in verdicts.items()} == {
        "forward": "slower",
        "backward": "slower",
    }
