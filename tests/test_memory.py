"""The memory of a call, with an allocator whose every byte is known."""

import weakref
from dataclasses import dataclass, field, replace

import fakes
import pytest
from test_measure import GPU_CASE, ON_GPU, Nvml, gpu_machine, machine, measured, short_rounds, traced  # noqa: F401 (fixtures)

from attn_exp.backends.base import Calls
from attn_exp.worker.measure import measure_case

MIB = 1 << 20
# What the backend below takes: at its start, in each forward for a moment, for as long as the output lives, in each
# backward for a moment, and outside of the allocator.
STATE, SCRATCH, SAVED, GRADIENTS, OUTSIDE = 7 * MIB, 50 * MIB, 20 * MIB, 30 * MIB, 400 * MIB


@dataclass
class Allocator:
    """Counts what is taken for as long as an object lives, or for a moment."""

    now: int = 0
    most: int = 0
    elsewhere: int = 3 * MIB
    log: list[str] = field(default_factory=list)

    def take(self, count, owner):
        self.now += count
        self.most = max(self.most, self.now)
        weakref.finalize(owner, self.give, count)

    def touch(self, count):
        self.most = max(self.most, self.now + count)

    def give(self, count):
        self.now -= count

    def allocated(self):
        return self.now

    def peak(self):
        return self.most

    def reset_peak(self):
        self.most = self.now

    def of_others(self):
        return None

    def outside(self):
        return self.elsewhere


class Takes(fakes.OnFakeGpu):
    """Right, and takes memory of `allocator` as said above."""

    def __init__(self, name, gpu, gpu_us, allocator, outside=0):
        super().__init__(name, gpu, gpu_us)
        self.allocator, self.outside = allocator, outside

    def prepare(self, case, inputs):
        right, allocator = super().prepare(case, inputs), self.allocator
        allocator.take(STATE, self)
        allocator.elsewhere += self.outside

        def forward():
            out = right.forward()
            allocator.take(SAVED, out)
            allocator.touch(SCRATCH)
            return out

        def backward(out):
            run = right.backward(out)

            def gradients():
                # The graph lives as long as its output.
                assert out is not None
                found = run()
                allocator.touch(GRADIENTS)
                return found

            return gradients

        return Calls(forward, backward, inputs=right.inputs)


def job(machine, tmp_path, outside=0, **measuring):  # noqa: F811
    machine.memory = Allocator()
    config = {"_target_": "test_memory.Takes", "name": "t", "gpu": machine.gpu, "gpu_us": 200.0}
    config |= {"allocator": machine.memory, "outside": outside}
    return measured(config, machine, tmp_path, GPU_CASE, **ON_GPU | measuring)


@pytest.fixture
def on_fake_gpu(gpu_machine, monkeypatch):  # noqa: F811
    traced(monkeypatch, gpu_machine.gpu, ("flash_fwd", 200.0))
    return gpu_machine


BOTH = {"passes": ("forward", "backward")}


@pytest.mark.parametrize("passes", [("forward",), ("backward",), ("forward", "backward")])
def test_a_peak_is_of_the_call_and_of_what_it_needs_whichever_passes_are_measured(on_fake_gpu, tmp_path, passes):
    record = job(on_fake_gpu, tmp_path, passes=passes)
    assert record.status == "ok", record.reason
    d_out = 4 * GPU_CASE.batch * GPU_CASE.q_heads * GPU_CASE.q_len * GPU_CASE.value_dim
    assert d_out % 512 == 0
    # Inputs are not counted here: this allocator does not know them, and d_out is taken off.
    peaks = {"forward": STATE + SAVED + SCRATCH - d_out, "backward": STATE + SAVED + GRADIENTS - d_out}
    for direction in passes:
        assert record.metrics[f"{direction}/peak_memory_bytes"] == peaks[direction]
        assert record.metrics[f"{direction}/outside_memory_bytes"] == 0
        passing = {"forward": SCRATCH, "backward": GRADIENTS}
        assert record.metrics[f"{direction}/workspace_bytes"] == passing[direction]


def test_memory_outside_of_the_allocator_is_told_and_flagged_if_it_is_much(on_fake_gpu, tmp_path):
    for outside, flagged in ((100 * MIB, False), (OUTSIDE, True)):
        record = job(on_fake_gpu, tmp_path, outside)
        assert record.metrics["forward/outside_memory_bytes"] == outside
        assert ("outside_memory" in record.flags) is flagged


def test_nobody_can_tell_whose_memory_it_is_on_a_shared_gpu(on_fake_gpu, tmp_path):
    class Shared(Nvml):
        def read(self):
            return super().read() | {"processes": 2}

    on_fake_gpu.state = Shared()
    record = job(on_fake_gpu, tmp_path, OUTSIDE)
    assert "shared_gpu" in record.flags
    assert "forward/outside_memory_bytes" not in record.metrics


def test_a_cpu_has_no_peak_and_a_workspace_that_is_named_is_a_metric(machine, tmp_path):  # noqa: F811
    record = measured({"_target_": "test_memory.HasWorkspace", "name": "w"}, machine, tmp_path, **BOTH)
    assert record.metrics["forward/workspace_bytes"] == 4096.0
    assert not [name for name in record.metrics if "backward/workspace" in name or "memory_bytes" in name]


class HasWorkspace(fakes.Honest):
    """Names the size of its forward's workspace."""

    def prepare(self, case, inputs):
        return replace(super().prepare(case, inputs), notes={"forward_workspace_bytes": 4096.0})


def test_rivals_of_a_duel_do_not_share_their_memory(on_fake_gpu, tmp_path):
    on_fake_gpu.memory = Allocator()
    requests = []
    for name in "ab":
        config = {"_target_": "test_memory.Takes", "name": name, "gpu": on_fake_gpu.gpu, "gpu_us": 200.0}
        request = fakes.make_request(config | {"allocator": on_fake_gpu.memory}, GPU_CASE, **ON_GPU | BOTH)
        requests.append(replace(request, job=f"fake-{name}"))
    peaks = [record.passes["forward"].peak_memory_bytes for record in measure_case(requests, on_fake_gpu)]
    assert peaks[0] == peaks[1] is not None
