"""Clocks, events and the judge's functions: what a backend replaces is named, and what honest ones do is not."""

import ast
import builtins
import math
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attn_exp.attention.mask_edges
import attn_exp.timers.cpu
import attn_exp.worker.secondary
from attn_exp.core import limits
from attn_exp.core.case import DTYPE_BYTES
from attn_exp.core.source import described
from attn_exp.run.job_queue import JobQueue
from attn_exp.run.worker import Worker
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.guard import Guard
from attn_exp.worker.machine.guarded import NAMES
from attn_exp.worker.machine.settings import Settings
from attn_exp.worker.measure import measure
from attn_exp.worker.stopped import Stopped

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path(__file__).resolve().parent
CEILINGS = {"matmul_flops_per_s": 1e12, "copy_bytes_per_s": 1e11}
# Folders whose modules judge and time.
JUDGING = ("attention", "timers", "worker", "workloads")
MODULES = {"gc", "math", "os", "random", "statistics", "time", "torch"}
# Attributes of other things than tensors, which tensors have too; and properties that no class can replace.
NOT_OF_TENSORS = {"__init__", "add", "backward", "cuda", "device", "indices", "median", "name", "norm", "mode",
                  "put", "solve", "split", "values"}  # fmt: skip


def used():
    """The dotted names, and the attributes that a tensor has, in the modules that judge and time."""
    names, attributes = set(), set()
    for path in [path for folder in JUDGING for path in (ROOT / "attn_exp" / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                parts, inner = [], node
                while isinstance(inner, ast.Attribute):
                    parts.append(inner.attr)
                    inner = inner.value
                if isinstance(inner, ast.Name):
                    names.add(".".join([inner.id, *reversed(parts)]))
                # Methods of what is no module, and is no list, text or file either.
                if not (isinstance(node.value, ast.Name) and node.value.id in MODULES):
                    attributes.add(node.attr)
    others = {name for kind in (list, dict, str, set, bytes, Path, re.Pattern) for name in dir(kind)}
    return names, {name for name in attributes - others if name in dir(torch.Tensor) and not name.startswith("__")}


def test_the_table_has_what_judging_and_timing_use():
    names, attributes = used()
    listed = {f"{place}.{name}" for place, several in NAMES.items() for name in several.split()}
    functions = {"torch": torch, "torch.cuda": torch.cuda, "torch.nn.functional": torch.nn.functional, "time": time}
    missing = {
        name
        for name in names
        for place, owner in functions.items()
        if name.rpartition(".")[0] == place
        and callable(getattr(owner, name.rpartition(".")[2], None))
        and not isinstance(getattr(owner, name.rpartition(".")[2]), type)
        and name not in listed
    }
    assert missing - {"torch.cuda.cudart"} == set()
    methods = {name for name in attributes if callable(getattr(torch.Tensor, name))}
    assert methods - NOT_OF_TENSORS - set(NAMES["torch.Tensor"].split()) == set()


def mine(*_, **__):
    return 0.0


REPLACED = {
    "time.perf_counter": (time, "perf_counter"),
    "time.time": (time, "time"),
    "torch.cuda.Event": (torch.cuda, "Event"),
    "torch.cuda.Event.elapsed_time": (torch.cuda.Event, "elapsed_time"),
    "torch.cuda.Event.record": (torch.cuda.Event, "record"),
    "torch.cuda.synchronize": (torch.cuda, "synchronize"),
    "torch.cuda._sleep": (torch.cuda, "_sleep"),
    "torch.autograd.grad": (torch.autograd, "grad"),
    "torch.autograd.profiler.profile": (torch.autograd.profiler, "profile"),
    "torch.Tensor.norm": (torch.Tensor, "norm"),
    "torch.Tensor.__sub__": (torch.Tensor, "__sub__"),
    "torch.Tensor.isfinite": (torch.Tensor, "isfinite"),
    "torch.Tensor.shape": (torch.Tensor, "shape"),
    "torch.nn.functional.scaled_dot_product_attention": (torch.nn.functional, "scaled_dot_product_attention"),
    "torch.equal": (torch, "equal"),
    "math.isfinite": (math, "isfinite"),
    "random.random": (random, "random"),
    "random.SystemRandom.getrandbits": (random.SystemRandom, "getrandbits"),
    "random.Random._randbelow": (random.Random, "_randbelow"),
    "torch.cuda.CUDAGraph.replay": (torch.cuda.CUDAGraph, "replay"),
    "builtins.abs": (builtins, "abs"),
    "builtins.float": (builtins, "float"),
    "attn_exp.timers.cpu.perf_counter_ns": (attn_exp.timers.cpu, "perf_counter_ns"),
    "attn_exp.timers.cpu.CpuTimer.block": (attn_exp.timers.cpu.CpuTimer, "block"),
    "attn_exp.worker.secondary.time": (attn_exp.worker.secondary, "time"),
    "attn_exp.core.limits.PRODUCT_FACTOR": (limits, "PRODUCT_FACTOR"),
}


@pytest.fixture(scope="module")
def guard():
    return Guard.snapshot()


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_named(guard, name):
    owner, attribute = REPLACED[name]
    own, before = attribute in vars(owner), getattr(owner, attribute)
    setattr(owner, attribute, 1e9 if isinstance(before, float) else mine)
    try:
        found = guard.violation()
    finally:
        if own or not isinstance(owner, type):
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)
    assert found == f"{name} was replaced"
    assert guard.violation() is None


def test_a_deleted_name_and_new_code_in_an_old_function_are_seen(guard, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(torch.cuda.Event, "elapsed_time")
        assert guard.violation() == "torch.cuda.Event.elapsed_time was replaced"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.synchronize, "__code__", mine.__code__)
        assert guard.violation() == "the code of torch.cuda.synchronize was replaced"
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.grad, "__defaults__", (None,))
        assert guard.violation() == "the code of torch.autograd.grad was replaced"
    with monkeypatch.context() as patch:
        # It is told where it is made, though a module that sorts before has it too.
        assert attn_exp.attention.mask_edges.DTYPE_BYTES is DTYPE_BYTES
        patch.setitem(DTYPE_BYTES, "bfloat16", 1)
        assert guard.violation() == "attn_exp.core.case.DTYPE_BYTES was changed"
    assert guard.violation() is None


def test_a_stream_that_a_graph_keeps_for_the_next_one_is_no_violation(guard, monkeypatch):
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", object())
    assert guard.violation() is None


class Mode(TorchFunctionMode):
    pass


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_what_is_left_active_is_named(guard):
    with Mode():
        assert guard.violation() == "a TorchFunctionMode (Mode) was left active"
    with Dispatch():
        assert guard.violation() == "a TorchDispatchMode (Dispatch) was left active"
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert guard.violation() == "forward hooks of all modules were left"
    finally:
        handle.remove()
    before = sys.getprofile()
    sys.setprofile(mine)
    try:
        found = guard.violation()
    finally:
        sys.setprofile(before)
    assert found == "sys.setprofile was called"
    with (
        pytest.raises(Stopped, match=r"a TorchFunctionMode \(Mode\) was left active while it was timed, so that no"),
        Mode(),
    ):
        guard.check("while it was timed")
    assert guard.violation() is None


def test_an_operator_that_python_replaces_is_named(guard):
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("erfinv", lambda x: x, "CPU")
        assert guard.violation() == "the operator aten/erfinv/CPU was replaced"
    finally:
        library._destroy()
    assert guard.violation() is None


HONEST = """
import importlib
import sys
import attn_exp.worker.measure
from attn_exp.worker.machine.guard import Guard
guard = Guard.snapshot()
import torch
import torch._inductor.compile_fx
for name in ("triton", "triton.language", "helion", "torch.profiler", "torch.testing", "torch.utils.cpp_extension",
    "torch.distributed", "torch.nn.attention.flex_attention", "torch.export", "torch.func", "torch.onnx", "pandas",
    "torch._functorch.aot_autograd", "torch.ao.quantization", "torch.nested", "numpy", "sympy", "mlflow", "matplotlib"):
    if importlib.util.find_spec(name.partition(".")[0]):
        importlib.import_module(name)
        assert guard.violation() is None, (name, guard.violation())
made = torch.compile(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x))
made(torch.randn(1, 1, 8, 8, requires_grad=True)).sum().backward()
with torch.profiler.profile():
    made(torch.randn(1, 1, 8, 8))
from torch.nn.attention.flex_attention import flex_attention
flex_attention(*torch.randn(3, 1, 1, 16, 16))
assert guard.violation() is None, guard.violation()
"""


def test_libraries_and_compilers_that_are_honest_replace_nothing():
    ran = subprocess.run([sys.executable, "-c", HONEST], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


def test_a_check_takes_milliseconds(guard):
    costs = []
    for _ in range(20):
        began = time.thread_time()
        guard.violation()
        costs.append(time.thread_time() - began)
    # Half a millisecond in a worker; here every test's modules are loaded, and other tests run beside.
    assert min(costs) < 2e-2


class Patching(fakes.Honest):
    """Replaces a clock when it is told to: as it is made, prepared, called for the first time, or timed."""

    def __init__(self, name, when, undo=False):
        super().__init__(name)
        self.when, self.undo = when, undo
        self.patch("made")

    def patch(self, now):
        if now == self.when:
            torch.Tensor.norm = mine

    def prepare(self, case, inputs):
        self.patch("prepared")
        calls = super().prepare(case, inputs)
        counted = []

        def forward():
            counted.append(None)
            self.patch("first" if len(counted) == 1 else "timed")
            return calls.forward()

        return replace(calls, forward=forward)


@pytest.fixture
def norm():
    yield
    if "norm" in vars(torch.Tensor) and torch.Tensor.norm is mine:
        torch.Tensor.norm = NORM


NORM = torch.Tensor.norm
WHEN = {
    "made": "while the backend was loaded",
    "prepared": "while the backend was prepared and called for the first time",
    "first": "while the backend was prepared and called for the first time",
    # What follows from it is an exception of the judge's own, or nothing.
    "timed": "while (it was timed|the backend ran)",
}


@pytest.mark.parametrize("when", WHEN)
def test_a_backend_that_replaces_what_judges_it_is_implausible(norm, when):
    machine = Machine("cpu", ceilings={dtype: dict(CEILINGS) for dtype in DTYPE_BYTES})
    request = fakes.make_request({"_target_": "test_guard.Patching", "name": "patching", "when": when})
    record = measure(request, machine)
    assert record.status == "implausible", record.reason
    assert re.match(rf"torch\.Tensor\.norm was replaced {WHEN[when]}, so that", record.reason)


class Setting(fakes.Honest):
    """Sets what holds for the whole process, as many programs do."""

    def prepare(self, case, inputs):
        torch.set_float32_matmul_precision("high")
        torch.set_default_dtype(torch.bfloat16)
        torch.set_flush_denormal(True)
        return super().prepare(case, inputs)


def test_settings_are_the_backends_and_not_those_of_the_reference():
    before = Settings.now()
    machine = Machine("cpu", ceilings={dtype: dict(CEILINGS) for dtype in DTYPE_BYTES})
    try:
        record = measure(fakes.make_request("test_guard.Setting"), machine)
        with machine.settings.again():
            assert machine.settings.changed() == {}
        changed = machine.settings.changed()
    finally:
        before.restore()
    assert record.status == "ok", record.reason
    assert record.environment["changed_settings"] == changed
    assert changed["flush_denormal"] == "True"
    assert changed["default_dtype"] == "torch.bfloat16" and changed["cuda_matmul_precision"] == "tf32"
    assert machine.settings.changed() == {}


def test_a_process_in_which_something_was_replaced_measures_no_other_job(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{ROOT}")
    monkeypatch.chdir(tmp_path)
    worker = Worker(reuse=True, timeout_s=300)
    queue, ends, processes = JobQueue(worker, tmp_path), [], []
    try:
        for job, target, when in (("a", "Setting", None), ("b", "Patching", "timed"), ("c", "Setting", None)):
            backend = {"_target_": f"test_guard.{target}", "name": "fake"} | ({"when": when} if when else {})
            made = fakes.make_request(backend)
            queue.submit(replace(made, job=job, source=described(backend["_target_"])))
            processes.append(worker._process.pid)
            ends.append(queue.record(queue.wait()))
    finally:
        worker.close()
    assert [end.status for end in ends] == ["ok", "implausible", "ok"], [end.reason for end in ends]
    assert processes[0] == processes[1] != processes[2]
