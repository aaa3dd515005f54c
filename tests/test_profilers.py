import contextlib
import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from cli import QUICK, records, run
from fakes import make_request

from attn_exp.backends.package import Package
from attn_exp.core.record.file import read_record
from attn_exp.core.record.profile import Profile, ProfiledKernel
from attn_exp.execution.closing import joined
from attn_exp.profilers.base import Early, Subject, kernels_csv, load_profiler
from attn_exp.profilers.chrome import PREFIX, read_trace
from attn_exp.profilers.hatchet import kernels_of, lines_of, rates, read_tree
from attn_exp.profilers.proton import ProtonPasses
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import Turns, measure_case
from attn_exp.worker.profile_pass import profile_job

# Excerpts of what an H200 left: 3 calls of each pass of cuDNN's attention inside of one range, torch 2.11, Triton 3.6.
KEPT = Path(__file__).parent / "profiles"


@pytest.fixture(scope="module")
def timed():
    """A tiny job that has been timed on the CPU: its record, its rival and the machine."""
    machine = Machine("cpu", ceilings={"float32": {"matmul_flops_per_s": 1e12, "copy_bytes_per_s": 1e11}})
    request, kept = make_request("fakes.Honest"), []
    turns = Turns(profile=lambda position, record, prepared: kept.append((record, prepared)))
    measure_case([replace(request, profilers=({"name": "any"},))], machine, turns=turns)
    ((record, prepared),) = kept
    return replace(record, request=request), prepared, machine


@pytest.fixture
def subject(timed, tmp_path):
    record, rival, machine = timed
    folder = tmp_path / "profiles" / "it"
    folder.mkdir(parents=True)
    return Subject(record, rival.backend, rival.calls, rival.scope, machine.gpu, tmp_path, folder)


def test_the_torch_profiler_leaves_a_trace_and_a_table_of_operators_on_a_cpu(timed, tmp_path):
    record, rival, machine = timed
    options = {"name": "torch", "_target_": "attn_exp.profilers.torch.TorchProfiler", "calls": 3}
    asked = replace(record, request=replace(record.request, profilers=(options,)))
    announced = []
    profile = profile_job(asked, rival, machine, tmp_path, announced.append).profiles["torch"]
    assert (profile.status, profile.reason, announced) == ("ok", None, ["profile"])
    assert profile.files == ("profiles/torch/trace.json", "profiles/torch/kernels.csv")
    for direction in ("forward", "backward"):
        own = [kernel for kernel in profile.kernels if kernel.direction == direction]
        assert "aten::bmm" in {kernel.name for kernel in own}
        assert all(kernel.count > 0 and kernel.time_us >= 0 for kernel in own)
        # Nested operators count once: the sum is no more than what the calls took.
        total = sum(kernel.time_us for kernel in own)
        assert profile.metrics[f"{direction}/operator_time_us"] == pytest.approx(total, rel=0.01)
    events = json.loads((tmp_path / profile.files[0]).read_text())["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert ranges == [f"{PREFIX}forward"] * 3 + [f"{PREFIX}backward"] * 3
    lines = (tmp_path / profile.files[1]).read_text().splitlines()
    assert lines[0] == "pass,name,count,time_us,share,total_us"
    assert len(lines) == 1 + len(profile.kernels)


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        (None, "failed", "a record cannot hold the profile of profiler=odd"),
        (Profile(status="ok", metrics={"rate": float("nan")}), "failed", "Expected `float`, got `null`"),
        (
            Profile(status="ok", kernels=(ProfiledKernel(direction="forward", name="k", figures={"grid": None}),)),
            "failed",
            "Expected `float | str`, got `null`",
        ),
        (Profile(status="ok", files=(Path("profiles/odd/a.txt"),)), "failed", "PosixPath is unsupported"),
        (Profile(status="ok", files=("profiles/odd/absent.txt",)), "ok", "profiles/odd/absent.txt is missing"),
    ],
)
def test_a_figure_that_no_record_can_hold_costs_the_profile_and_not_the_record(
    timed, tmp_path, monkeypatch, found, status, words
):
    record, rival, machine = timed
    module = types.ModuleType("odd")
    module.make = lambda name: types.SimpleNamespace(profile=lambda subject: found)
    monkeypatch.setitem(sys.modules, "odd", module)
    asked = replace(record, request=replace(record.request, profilers=({"name": "odd", "_target_": "odd.make"},)))
    profile_job(asked, rival, machine, tmp_path, lambda *_: None)
    kept = read_record(tmp_path)
    assert kept.metrics == record.metrics
    assert kept.profiles["odd"].status == status and words in kept.profiles["odd"].reason
    assert kept.profiles["odd"].files == ()


def test_a_trace_of_a_gpu_is_a_table_with_launches_and_gaps():
    found = read_trace(KEPT / "trace.json", "cuda")
    assert list(found) == ["forward", "backward"]
    forward = found["forward"]
    assert [(kernel.name.split("_knob")[0], kernel.count) for kernel in forward.kernels] == [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 3.0),
        ("Memset (Device)", 3.0),
    ]
    assert forward.kernels[0].time_us == pytest.approx(646.08)
    figures = forward.kernels[0].figures
    assert (figures["grid"], figures["block"], figures["registers"]) == ("132x1x1", "384x1x1", 168)
    assert figures["shared_memory_bytes"] == 232448
    assert "occupancy_percent" not in figures, "0 is no occupancy: kineto did not know"
    assert found["backward"].kernels[1].figures["occupancy_percent"] == 100
    assert forward.metrics["kernel_time_us"] == pytest.approx(648.288)
    assert forward.span_us == pytest.approx(forward.time_us + forward.gap_us)
    # The kernel `add` was launched outside of all ranges.
    assert not any(kernel.name == "add" for one in found.values() for kernel in one.kernels)
    assert "132x1x1" in kernels_csv(forward.kernels)


def test_a_hatchet_tree_is_a_table_with_rates():
    root = read_tree(KEPT / "tree.hatchet")
    (forward,) = kernels_of(root, "forward", 3)
    assert forward.time_us == pytest.approx(641.824 / 3)
    assert forward.count == 1
    # The scope said 412,316,860,416 FLOP for its 3 calls.
    assert forward.figures["tflops"] == pytest.approx(412316860416 / 641824 / 1e3)
    backward = kernels_of(root, "backward", 3)
    assert [kernel.count for kernel in backward] == [1, 1, 1]
    assert backward[0].time_us > backward[1].time_us > backward[2].time_us
    assert all(not kernel.figures for kernel in backward), "whose the work was is not known"
    assert rates(root, "backward")["tflops"] == pytest.approx(522.43, abs=0.01)
    assert lines_of(root, "forward") == ()
    with pytest.raises(ValueError, match="no scope 'sideways'"):
        kernels_of(root, "sideways", 3)


def test_lines_of_a_sampled_tree_come_with_what_they_wait_for(tmp_path):
    def line(place, samples, stalled, **stalls):
        metrics = {"num_samples": samples, "num_stalled_samples": stalled, **stalls}
        return {"frame": {"name": place}, "metrics": metrics, "children": []}

    first = line("/x/forward_kernel.py:forward_kernel@40", 30, 12, stalled_wait=9, stalled_barrier=3)
    lines = [first, line("/x/forward_kernel.py:forward_kernel@41", 10, 0)]
    kernel = {"frame": {"name": "forward_kernel"}, "metrics": {}, "children": lines}
    without = line("elementwise", 5, 1)
    root = {"frame": {"name": "ROOT"}, "children": [{"frame": {"name": "forward"}, "children": [kernel, without]}]}
    (tmp_path / "tree.hatchet").write_text(json.dumps([root]))
    found = lines_of(read_tree(tmp_path / "tree.hatchet"), "forward")
    assert [(one.place[-2:], one.samples, one.share, one.stalled_share, one.stall) for one in found] == [
        ("40", 30, 0.75, 0.4, "wait"),
        ("41", 10, 0.25, 0.0, ""),
        ("", 5, 1.0, 0.2, ""),
    ]
    assert found[-1].kernel == "elementwise", "a kernel without lines has the samples itself"


class FakeProton(types.ModuleType):
    """Triton's profiler as far as it is used; every session leaves the tree that was kept, or one of `lines`."""

    def __init__(self, lines: dict | None = None) -> None:
        super().__init__("triton.profiler")
        self.entered, self.lines, self.path, self.mode = [], lines, "", None

    def start(self, name, *, context, data, backend, mode=None):
        self.path, self.mode = name, mode
        return 7

    def scope(self, name, metrics):
        assert self.path, "no session has begun"
        self.entered.append((name, metrics))
        return contextlib.nullcontext()

    def finalize(self, session):
        assert session == 7
        if self.mode == "pcsampling":
            Path(f"{self.path}.hatchet").write_text(json.dumps([self.lines]))
        else:
            shutil.copy(KEPT / "tree.hatchet", f"{self.path}.hatchet")


def test_proton_tells_each_scope_its_work_and_keeps_the_tree(subject, monkeypatch):
    proton = FakeProton()
    monkeypatch.setattr(Package, "load", lambda package: proton)
    profile = ProtonPasses("it", calls=3).profile(subject)
    assert [name for name, _ in proton.entered] == ["forward"] * 3 + ["backward"] * 3
    # 2 matrix products of 136 unmasked pairs, 2 heads and dimension 8.
    assert proton.entered[0][1] == {"flops": pytest.approx(2 * 136 * 2 * 16), "bytes": pytest.approx(4224)}
    assert profile.status == "ok" and profile.reason is None
    assert profile.files == ("profiles/it/proton.hatchet", "profiles/it/kernels.csv")
    assert profile.metrics["forward/tflops"] == pytest.approx(642.414, abs=0.01)
    assert profile.metrics["backward/kernel_time_us"] == pytest.approx(657.686, abs=0.01)
    assert len(profile.kernels) == 4


def test_the_trees_of_several_jobs_are_one_file_with_a_scope_each(tmp_path):
    kept = KEPT / "tree.hatchet"
    (root, devices) = json.loads(joined({"cudnn": kept, "flash": kept}))
    assert [scope["frame"]["name"] for scope in root["children"]] == ["cudnn", "flash"]
    for scope in root["children"]:
        assert rates(scope, "forward")["tflops"] == pytest.approx(642.414, abs=0.01)
    assert "CUDA" in devices


def test_a_tree_without_kernels_is_no_profile_and_no_time_of_zero(subject, monkeypatch):
    def nothing(self, session):
        passes = [{"frame": {"name": name}, "children": []} for name in ("forward", "backward")]
        Path(f"{self.path}.hatchet").write_text(json.dumps([{"frame": {"name": "ROOT"}, "children": passes}]))

    monkeypatch.setattr(FakeProton, "finalize", nothing)
    monkeypatch.setattr(Package, "load", lambda package: FakeProton())
    profile = ProtonPasses("it", calls=10).profile(subject)
    assert (profile.status, profile.metrics, profile.kernels) == ("failed", {}, ())
    assert profile.reason == "proton saw no kernel of forward; proton saw no kernel of backward"


def sampled_tree(*places: str) -> dict:
    """What Proton writes of a kernel of which it knows the samples of these lines, or of none."""
    samples = {"num_samples": 10, "num_stalled_samples": 5}
    lines = [{"frame": {"name": place}, "metrics": samples, "children": []} for place in places]
    kernel = {"frame": {"name": "forward_kernel"}, "metrics": {} if lines else samples, "children": lines}
    passes = [{"frame": {"name": name}, "children": [kernel]} for name in ("forward", "backward")]
    return {"frame": {"name": "ROOT"}, "metrics": {}, "children": passes}


def sampled(subject, monkeypatch, proton):
    """The lines that a fake Proton finds, begun before there is anything to call."""
    monkeypatch.setattr(Package, "load", lambda package: proton)
    profiler = load_profiler({"_target_": "attn_exp.profilers.proton.ProtonLines", "name": "it", "calls": 2})
    assert isinstance(profiler, Early)
    profiler.begin(subject.folder)
    assert proton.mode == "pcsampling" and not proton.entered
    return profiler.profile(subject)


def test_lines_are_sampled_from_before_the_kernels_are_loaded(subject, monkeypatch):
    proton = FakeProton(
        sampled_tree("/x/forward_kernel.py:forward_kernel@41", "/x/forward_kernel.py:forward_kernel@42")
    )
    profile = sampled(subject, monkeypatch, proton)
    assert (profile.status, profile.reason) == ("ok", None)
    assert profile.files == ("profiles/it/lines.hatchet", "profiles/it/lines.csv")
    table = (subject.folder / "lines.csv").read_text().splitlines()
    assert len(table) == 1 + 4 and "forward_kernel@41" in table[1]
    assert [name for name, _ in proton.entered] == ["forward"] * 2 + ["backward"] * 2


def test_profilers_on_a_cpu_from_end_to_end(tmp_path):
    """Proton says why not, one in a process of its own works, and one that crashes there costs itself alone."""
    done = run(
        *("backend=eager", "profiler=[proton,torch,apart,crashesapart]", "sweep=a", *QUICK),
        "passes=[forward,backward]",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = records(tmp_path, "a")["eager"].profiles
    assert found["proton"].status == "unavailable"
    assert "use profiler=torch on a CPU" in found["proton"].reason
    assert "profiler=proton unavailable: proton needs" in done.stdout
    assert found["torch"].status == "ok"
    assert (found["apart"].status, found["apart"].metrics) == ("ok", {"processes": 2.0, "passes": 2.0})
    assert found["crashesapart"].status == "failed"
    assert "the process of profiler=crashesapart was killed by SIGSEGV" in found["crashesapart"].reason
    page = next(tmp_path.glob("multirun/a/eager-*/profiles/explain.txt")).read_text()
    assert "forward is bound by" in page and "proton unavailable" in page
