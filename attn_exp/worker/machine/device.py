"""The machine that a worker measures on: device, environment, ceilings, and the last case's reference."""

import importlib
import itertools
import math
import secrets
import statistics
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from attn_exp.attention.alike import Alike, alike_inputs
from attn_exp.attention.error_parts import Tolerance
from attn_exp.attention.expected import Expected, expected
from attn_exp.attention.inputs import DifferentiableInputs, Inputs, make_inputs
from attn_exp.backends.package import Unavailable
from attn_exp.core.case import E4M3, INT8, NORMAL, Case
from attn_exp.core.flags import host_reading
from attn_exp.core.nvml import GpuState
from attn_exp.core.request import Request
from attn_exp.timers.gpu import Cuda, Gpu
from attn_exp.worker.machine.ceilings import canaries, copy_ceiling, matmul_ceiling
from attn_exp.worker.machine.environment import environment
from attn_exp.worker.machine.memory import CudaMemory, DeviceMemory
from attn_exp.worker.machine.settings import Settings
from attn_exp.worker.machine.watch import Watch, watch_cpu, watch_gpu
from attn_exp.workloads.base import Workload

if TYPE_CHECKING:
    from attn_exp.worker.machine.guard import Guard


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


# Seconds of matrix products before they are measured: the power limit acts after some (timers/settle.py).
LOAD_S = 2.0
# The kind of values that a backend is judged on besides those that are timed.
HARD = "mixed"


@dataclass
class Machine:
    """What a worker keeps from job to job.

    Attributes:
        device: `cuda` or `cpu`.
        gpu: the GPU's clock and queue, None on a CPU.
        state: NVML's readings, None without NVML.
        environment: names, versions and settings of each record.
        ceilings: by dtype.
        canaries: microseconds of fixed work, measured once.
        expected: the last case's reference, and what it belongs to.
        tolerances: of cases with normal inputs and one row of the batch, with or without gradients.
        values: the same on other values by their kind, with the seed of these and the row of the batch.
        loaded_s: the longest load that the GPU has been under, in seconds.
        settings: PyTorch's settings before any backend was loaded.
        memory: the GPU's counters of memory, None on a CPU.
        watch: looks at clock, power and energy while calls are timed.
        guard: what judging and timing use, as it was then; None if each job takes it anew.
    """

    device: str
    gpu: Cuda | None = None
    state: GpuState | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)
    canaries: dict[str, float] = field(default_factory=dict)
    expected: tuple[Any, Expected] | None = None
    tolerances: dict[tuple[Case, bool], dict[str, Tolerance]] = field(default_factory=dict)
    values: dict[str, tuple[Any, int, int, Expected]] = field(default_factory=dict)
    loaded_s: float = 0.0
    settings: Settings = field(default_factory=Settings.now)
    memory: DeviceMemory | None = None
    watch: Watch = field(default_factory=Watch)
    guard: "Guard | None" = None

    @classmethod
    def open(cls, device: str) -> "Machine":
        """Open the device: context, flush buffer, NVML.

        Raises:
            Unavailable: PyTorch sees no CUDA device.
        """
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
        gpu = Cuda()
        machine = cls(device, gpu=gpu, environment=environment(device) | event_floor(gpu), memory=CudaMemory())
        try:
            machine.state = GpuState(machine.environment["gpu_uuid"])
            machine.environment |= machine.state.constant()
            machine.watch = watch_gpu(machine.environment["gpu_uuid"], machine.environment)
        except Exception as error:  # without NVML there is no telemetry, but the measurement is valid
            machine.environment["nvml"] = f"no telemetry: {error}"
            machine.watch = Watch(None, machine.environment["nvml"])
        return machine

    def ceilings_for(self, dtype: str, *, settle_s: float = math.inf) -> dict[str, float]:
        """Return the machine's measured ceilings for inputs of `dtype`.

        On a GPU they are those after `LOAD_S` seconds of load, or after less where what is timed gets no longer than
        `settle_s` to settle. The very first request loads libraries on the host meanwhile.
        """
        load_s = min(LOAD_S, settle_s)
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
            if not self.canaries:
                self.canaries = canaries(self.device)
            self.watch.loaded()
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
    ) -> tuple[Alike, int, Expected]:
        """Return values for a case, a row of the batch drawn at random, and the reference of that row.

        Rows of a batch do not depend on each other. The next rival of the same case gets the same.

        Args:
            request: the job, of an attention without a block.
            kind: `NORMAL` or `HARD`.
            like: inputs of the case, for their layout and scales.
            with_gradients: whether the reference has gradients.

        Raises:
            ValueError: the formula's result on these values is not finite, so that there is no tolerance.
        """
        case, key = request.case, _key_of_values(request, with_gradients=with_gradients)
        known = self.values.get(kind)
        if known is not None and known[0] == key:
            seed, row, made = known[1:]
            return alike_inputs(kind, case, like, seed), row, made
        self.values.pop(kind, None)
        # Other ones in each process, so that no backend can be right on only these values.
        seed, row = secrets.randbits(63), secrets.randbelow(case.batch)
        values = alike_inputs(kind, case, like, seed)
        of_row = values.inputs.row(row)
        for tensor in of_row.qkv:
            tensor.requires_grad_(with_gradients)
        made = expected(replace(case, batch=1), of_row, with_gradients=with_gradients, sampled=True)
        self.values[kind] = key, seed, row, made
        return values, row, made

    def forget_other_case(self, request: Request, *, with_gradients: bool) -> None:
        """Free the kept references unless this job can use them."""
        key = (request.case, request.measuring.seed, request.measuring.inputs, with_gradients)
        if self.expected and self.expected[0] != key:
            self.expected = None
        key_of_values = _key_of_values(request, with_gradients=with_gradients)
        self.values = {kind: known for kind, known in self.values.items() if known[0] == key_of_values}

    def reading(self) -> list[dict[str, Any]]:
        """Return what NVML, or on a CPU Linux, reports now; empty if neither is available."""
        if self.gpu is None:
            counters = host_reading()
            return [counters] if counters else []
        return [self.state.read()] if self.state else []


def _key_of_values(request: Request, *, with_gradients: bool) -> tuple[Case, int, bool]:
    return request.case.alone, request.measuring.seed, with_gradients


def event_floor(gpu: Gpu) -> dict[str, float]:
    """Return the time between two adjacent events, and the step of event times, in microseconds."""
    # Long enough for an idle GPU to raise its clocks, with which an event takes 8 to 13 us, and to enqueue all events.
    gpu.sleep_us(50_000.0)
    events = [gpu.event() for _ in range(101)]
    gpu.synchronize()
    times = sorted(gpu.elapsed_us(first, second) for first, second in itertools.pairwise(events))
    steps = [second - first for first, second in itertools.pairwise(times) if second - first > 1e-3]
    return {"event_floor_us": statistics.median(times), "event_quantum_us": min(steps, default=0.0)}
