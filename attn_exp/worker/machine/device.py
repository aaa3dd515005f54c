"""The machine that a worker measures on: device, environment, ceilings, and the last case's reference."""

import importlib
import itertools
import os
import secrets
import statistics
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_exp.attention.error import Tolerance
from attn_exp.attention.expected import Expected, expected
from attn_exp.attention.hard_values import draw
from attn_exp.attention.inputs import DifferentiableInputs, Inputs, make_inputs
from attn_exp.backends.package import Unavailable
from attn_exp.core.case.case import E4M3, GIVEN, INT8, NORMAL, Case
from attn_exp.core.host.nvml import GpuState, used_bytes
from attn_exp.core.record.flags import host_reading
from attn_exp.core.record.request import Request
from attn_exp.timers.card import Card
from attn_exp.timers.gpu import Gpu
from attn_exp.worker.machine.ceilings import copy_ceiling, matmul_ceiling
from attn_exp.worker.machine.environment import environment
from attn_exp.worker.machine.memory import CudaMemory
from attn_exp.worker.machine.settings import Settings
from attn_exp.worker.machine.watch import Watch, watch_cpu, watch_gpu
from attn_exp.workloads.base import Workload


def import_autograd() -> None:
    """Import what `torch.autograd.grad` imports for its first gradient: sympy and its dependencies.

    It takes 0.3 s on a fast disk and 2 s on the GPU host (torch 2.11).
    """
    importlib.import_module("torch.fx.experimental.symbolic_shapes")


def load_libraries(dtype: str) -> None:
    """Run the smallest attention on the GPU, which loads cuBLAS, cuDNN and the kernels of the accuracy check.

    Codes are replaced by bfloat16, since PyTorch's SDPA does not take them.
    """
    dtype = "bfloat16" if dtype in (E4M3, INT8) else dtype
    case = Case(batch=1, q_heads=1, kv_heads=1, q_len=128, kv_len=128, head_dim=64, value_dim=64, dtype=dtype)
    inputs = make_inputs(case, "cuda", 0, with_gradients=True)
    out = torch.nn.functional.scaled_dot_product_attention(*inputs.qkv)
    expected(case, inputs, with_gradients=True).judge("out", out)
    # Last, since it waits for `import_autograd`.
    torch.autograd.grad(out, inputs.qkv, inputs.d_out_bhsd)


# Seconds of matrix products before they are measured: the power limit acts after some (timers/pace.py).
LOAD_S = 0.5
# The kinds of values that a backend is checked on besides those that are timed (attention/hard_values.py).
HARD, FAINT = "mixed", "faint"
# Bytes of q, k and v of these that are kept for other jobs.
_MOST_VALUES = 1 << 29


@dataclass
class Machine:
    """State that a worker keeps from job to job; `gpu`, `state` (NVML's readings) and `memory` are None on a CPU.

    Attributes:
        expected: the last case's reference, and its key.
        tolerances: those of cases with normal inputs and one row of the batch, with or without gradients.
        values: other values of one row of the batch by their kind and case, with the row of the results that is
            compared, and its reference.
        loaded_s: the longest load that the GPU has been under, in seconds.
        settings: PyTorch's settings before any backend was loaded.
        card: the GPU's clock in bursts; None on a CPU.
        shared: inputs of rivals that are measured in turns, whose memory is shared; None if a job is alone.
        signs: of these inputs, as `Contents` has them.
        announce: called with `check`, `compile` or `time` when a job begins that.
    """

    device: str
    gpu: Gpu | None = None
    state: GpuState | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)
    expected: tuple[Any, Expected] | None = None
    tolerances: dict[tuple[Case, bool], dict[str, Tolerance]] = field(default_factory=dict)
    values: dict[Any, tuple[Inputs, int, Expected]] = field(default_factory=dict)
    loaded_s: float = 0.0
    settings: Settings = field(default_factory=Settings.now)
    memory: CudaMemory | None = None
    watch: Watch = field(default_factory=Watch)
    card: Card | None = None
    shared: dict[Any, Inputs] | None = None
    signs: dict[int, bool] | None = None
    announce: Callable[[str], None] = lambda stage: None

    @classmethod
    def open(cls, device: str) -> "Machine":
        """Open the device: context, flush buffer, NVML. Raises Unavailable if PyTorch sees no CUDA device."""
        if device != "cuda":
            # Its reference imports what autograd needs, before a backend is timed; a job of forwards does not need it.
            return cls(device, environment=environment(device), watch=watch_cpu())
        threading.Thread(target=import_autograd).start()
        if not torch.cuda.is_available():
            raise Unavailable(
                f"PyTorch {torch.__version__} sees no CUDA device: install a CUDA build of torch, or set device=cpu"
            )
        # Every process gets this warning at the first product in autograd's thread; PyTorch then sets the context
        # itself.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        # Not the default stream: CUDA graphs cannot be captured on it, and a backward runs on its forward's stream.
        torch.cuda.set_stream(torch.cuda.Stream())
        taken = used_bytes(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        gpu = Gpu()
        machine = cls(
            device, gpu=gpu, environment=environment(device) | event_floor(gpu), memory=CudaMemory(taken), card=Card()
        )
        try:
            machine.state = GpuState(machine.environment["gpu_uuid"])
            machine.environment |= machine.state.constant()
            machine.watch = watch_gpu(machine.environment["gpu_uuid"], machine.environment)
            machine.card = Card(limit_mhz=machine.environment.get("max_sm_clock_mhz") or 0.0)
        except Exception as error:  # without NVML there is no telemetry, but the measurement is valid
            machine.environment["nvml"] = f"no telemetry: {error}"
            machine.watch = Watch(None, machine.environment["nvml"])
        return machine

    def ceilings_for(self, dtype: str, *, sustained: bool = True) -> dict[str, float]:
        """Return the machine's measured ceilings for inputs of `dtype`.

        On a GPU they are those after `LOAD_S` seconds of load if they are to be `sustained`. The very first request
        loads libraries on the host meanwhile.
        """
        load_s = LOAD_S if sustained else 0.0
        first = next(iter(self.ceilings.values()), None)
        if self.gpu is not None and (first is None or load_s > self.loaded_s):
            with ThreadPoolExecutor(1) as pool:
                loading = pool.submit(matmul_ceiling, self.device, dtype, load_s)
                if first is None:
                    load_libraries(dtype)
                loading.result()
            self.loaded_s = load_s
        if dtype not in self.ceilings:
            # Not the load's own rate: its thread waits for the interpreter's lock while libraries load.
            matmul = matmul_ceiling(self.device, dtype, 0.0)
            copy = first["copy_bytes_per_s"] if first else copy_ceiling(self.device)
            self.ceilings[dtype] = {"copy_bytes_per_s": copy, "matmul_flops_per_s": matmul}
        return self.ceilings[dtype]

    def expected_for(
        self, request: Request, inputs: DifferentiableInputs, workload: Workload, *, with_gradients: bool
    ) -> Expected:
        """Return the float32 reference and its tolerances, kept for the next rival of the same case."""
        key = (request.case, request.measuring.seed, request.measuring.inputs, with_gradients)
        if self.expected is None or self.expected[0] != key:
            self.expected = None
            case = request.case
            # Tolerances are measured on one row of the batch; how many there are does not matter. Those of hard values
            # differ from draw to draw.
            shared = replace(case, batch=1), with_gradients
            normal = case.workload is None and request.measuring.inputs == NORMAL
            known = self.tolerances.get(shared) if normal else None
            with self.settings.again():
                made = workload.expected(case, inputs, with_gradients=with_gradients, tolerances=known)
            if normal:
                self.tolerances[shared] = made.tolerances
            self.expected = key, made
        return self.expected[1]

    def values_for(
        self, request: Request, kind: str, like: Inputs, *, with_gradients: bool
    ) -> tuple[Inputs, int, Expected]:
        """Return values for one row of a case's batch, a row drawn at random, and the reference of the values.

        Rows of a batch do not depend on each other: all get these values, in the layout and with the scales of `like`.
        The next rival of the same case gets the same. Raises ValueError if the formula's result on these values is not
        finite, so that there is no tolerance.
        """
        one = replace(request.case, batch=1)
        key = kind, one, like.scales, with_gradients
        if (known := self.values.get(key)) is not None and known[1] < request.case.batch:
            return known
        seed, row = secrets.randbits(63), secrets.randbelow(request.case.batch)
        if kind == NORMAL:
            values = make_inputs(one, self.device, seed, with_gradients=False)
        else:
            values = draw(kind, one, torch.Generator(self.device).manual_seed(seed), like=like.row(0))
        for tensor in values.qkv:
            tensor.requires_grad_(with_gradients)
        made = expected(one, values, with_gradients=with_gradients, sampled=True)
        self.values[key] = values, row, made
        held = sum(tensor.nbytes for values, _, _ in self.values.values() for tensor in values.qkv)
        while held > _MOST_VALUES and len(self.values) > 1:
            oldest, *_ = self.values.pop(next(iter(self.values)))
            held -= sum(tensor.nbytes for tensor in oldest.qkv)
        return values, row, made

    def forget_other_case(self, request: Request, *, with_gradients: bool) -> None:
        """Free the kept reference unless this job can use it."""
        key = (request.case, request.measuring.seed, request.measuring.inputs, with_gradients)
        if self.expected and self.expected[0] != key:
            self.expected = None

    def inputs_for(self, request: Request, workload: Workload, *, with_gradients: bool) -> DifferentiableInputs:
        """Return a job's inputs; those of rivals that are measured in turns share memory, and are leaves of their own.

        What a user gave, and a transformer block's, are each rival's own.
        """
        measuring = request.measuring
        if self.shared is not None and request.case in self.shared:
            return self.shared[request.case].alias()
        made: DifferentiableInputs = workload.make_inputs(
            request.case, self.device, measuring.seed, with_gradients=with_gradients, kind=measuring.inputs
        )
        if self.shared is None or not isinstance(made, Inputs) or made.kind == GIVEN:
            return made
        self.shared[request.case] = made
        self.signs = dict.fromkeys((one.data_ptr() for one in (*made.operands, made.d_out)), False)
        return made.alias()

    def reading(self) -> list[dict[str, Any]]:
        """Return what NVML, or on a CPU Linux, reports now; empty if neither is available."""
        if self.gpu is None:
            counters = host_reading()
            return [counters] if counters else []
        return [self.state.read()] if self.state else []


def event_floor(gpu: Gpu) -> dict[str, float]:
    """Return the time between two adjacent events, and the step of event times, in microseconds."""
    # Long enough for an idle GPU to raise its clocks, with which an event takes 8 to 13 us, and to enqueue all events.
    gpu.sleep_us(50_000.0)
    events = [gpu.event() for _ in range(101)]
    gpu.synchronize()
    times = sorted(gpu.elapsed_us(first, second) for first, second in itertools.pairwise(events))
    steps = [second - first for first, second in itertools.pairwise(times) if second - first > 1e-3]
    return {"event_floor_us": statistics.median(times), "event_quantum_us": min(steps, default=0.0)}
