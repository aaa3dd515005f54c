"""Machine: what a worker keeps from job to job: the device and its clocks, ceilings, and the last case's reference."""

import itertools
import statistics
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_exp.backends.package import Unavailable
from attn_exp.canaries import canaries
from attn_exp.ceilings import copy_ceiling, matmul_ceiling
from attn_exp.environment import environment
from attn_exp.host import host_reading
from attn_exp.inputs import Given
from attn_exp.nvml import GpuState
from attn_exp.preload import import_autograd, load_libraries
from attn_exp.record import Request
from attn_exp.timers.gpu import Cuda, Gpu
from attn_exp.tolerance import Expected
from attn_exp.workloads import workload_of

LOAD_S = 2.0


@dataclass
class Machine:
    """What a worker keeps from job to job: device, clocks, ceilings, and the last case's reference."""

    device: str
    gpu: Cuda | None = None
    state: GpuState | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)
    canaries: dict[str, float] = field(default_factory=dict)
    expected: tuple[Any, Expected] | None = None
    loaded: bool = False

    @classmethod
    def open(cls, device: str) -> "Machine":
        """Take possession of the device: context, flush buffer, NVML."""
        imports = import_autograd()
        if device != "cuda":
            imports.join()
            return cls(device, environment=environment(device))
        if not torch.cuda.is_available():
            raise Unavailable(
                f"PyTorch {torch.__version__} sees no CUDA device: install a CUDA build of torch, or set device=cpu"
            )
        # The first product of autograd's own thread says so in every process, and makes the context right itself.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        # Not the default stream: CUDA graphs cannot be captured on it, and a backward runs where its forward ran.
        torch.cuda.set_stream(torch.cuda.Stream())
        gpu = Cuda()
        machine = cls(device, gpu=gpu, environment=environment(device) | event_floor(gpu))
        try:
            machine.state = GpuState(machine.environment["gpu_uuid"])
            machine.environment |= machine.state.constant()
        except Exception as error:  # NVML's absence costs telemetry, not the measurement; the record says so
            machine.environment["nvml"] = f"no telemetry: {error}"
        return machine

    def ceilings_for(self, dtype: str, *, load: bool = True) -> dict[str, float]:
        """The machine's measured ceilings for inputs of `dtype`.

        On a GPU the first ask with `load` puts it under load for seconds, and the first of all uses the time to load
        libraries on the host.
        """
        first = next(iter(self.ceilings.values()), None)
        if self.gpu is not None and (first is None or (load and not self.loaded)):
            with ThreadPoolExecutor(1) as pool:
                loading = pool.submit(matmul_ceiling, self.device, dtype, LOAD_S if load else 0.0)
                if first is None:
                    load_libraries(dtype)
                loading.result()
            self.loaded = load
        if dtype not in self.ceilings:
            # Not the loading thread's own figure: while libraries load, it waits for the interpreter's lock.
            matmul = matmul_ceiling(self.device, dtype, 0.0)
            copy = first["copy_bytes_per_s"] if first else copy_ceiling(self.device)
            if not self.canaries:
                self.canaries = canaries(self.device)
            self.ceilings[dtype] = {"copy_bytes_per_s": copy, "matmul_flops_per_s": matmul}
        return self.ceilings[dtype]

    def expected_for(self, request: Request, inputs: Given, *, with_gradients: bool) -> Expected:
        """The float32 reference and its tolerances, kept for the next rival of the same case."""
        key = (request.case, request.measuring.seed, with_gradients)
        if self.expected is None or self.expected[0] != key:
            self.expected = None
            made = workload_of(request.case).expected(request.case, inputs, with_gradients=with_gradients)
            self.expected = key, made
        return self.expected[1]

    def forget_other_case(self, request: Request, *, with_gradients: bool) -> None:
        """Free the kept reference unless this job can use it."""
        if self.expected and self.expected[0] != (request.case, request.measuring.seed, with_gradients):
            self.expected = None

    def reading(self) -> list[dict[str, Any]]:
        """What NVML, or on a CPU Linux, says at this moment; nothing where neither answers."""
        if self.gpu is None:
            found = host_reading()
            return [found] if found else []
        return [self.state.read()] if self.state else []

    def held_bytes(self) -> int:
        """Memory that is allocated on the GPU now."""
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


def event_floor(gpu: Gpu) -> dict[str, float]:
    """What a pair of events with nothing between them measures, and the step in which event times come, in us."""
    # Long enough for an idle GPU to raise its clocks, at which an event takes 8 to 13 us, and until all are enqueued.
    gpu.sleep_us(50_000.0)
    events = [gpu.event() for _ in range(101)]
    gpu.synchronize()
    times = sorted(gpu.elapsed_us(first, second) for first, second in itertools.pairwise(events))
    steps = [second - first for first, second in itertools.pairwise(times) if second - first > 1e-3]
    return {"event_floor_us": statistics.median(times), "event_quantum_us": min(steps, default=0.0)}
