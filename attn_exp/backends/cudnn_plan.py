"""cuDNN's attention graphs, built into plans that are ready to run.

Nothing here imports `cudnn` itself: whoever builds hands the module over.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from attn_exp.backends.cudnn_case import Operand
from attn_exp.backends.package import Refused

# From an unbuilt graph and its inputs by name to the graph's tensors for the outputs; None for one it does not make.
Node = Callable[..., Sequence[Any]]

_DTYPES = {
    torch.float16: "HALF",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
    torch.int32: "INT32",
    torch.float8_e4m3fn: "FP8_E4M3",
}
# cudnn-frontend 1.32 brings attention kernels of its own in Python (the CuTe DSL) and may rank them before cuDNN's
# (cudnn/sdpa/fwd/placement.py); their names begin with these, those of cuDNN's engines with `eng`.
_NOT_CUDNN = ["sdpa_fwd_", "sdpa_bwd_"]
# What cuDNN says when it has no kernel, as opposed to when something broke.
_DECLINED = re.compile(r"no valid (engine|execution)|not[_ ]supported|no engine", re.IGNORECASE)
_LONGEST_REASON = 300
# Every graph that was built, about 1 MiB of host memory each. One that is freed unloads its kernels, others are loaded
# at the same addresses, and CUPTI goes on calling them by the old names: of 48 kernels of plans that came and went on
# an H200 (torch 2.11, CUDA 13.0, cuDNN 9.19) 5 were named as another's, of 48 with the graphs kept none.
_BUILT: list[Any] = []


@dataclass(frozen=True)
class Plan:
    """A graph that was built: a call that runs it on the current stream, and what it needs."""

    run: Callable[[], None]
    workspace_bytes: int
    build_s: float

    def notes(self, direction: str) -> dict[str, float]:
        """What is worth keeping in the record."""
        return {
            f"{direction}_workspace_bytes": float(self.workspace_bytes),
            f"{direction}_build_s": round(self.build_s, 6),
        }


def build(cudnn: ModuleType, api: str, node: Node, inputs: Mapping[str, Operand], outputs: Sequence[Operand]) -> Plan:
    """Build the graph of one node by the binding API (`binding`) or through `cudnn.Graph` (`wrapper`).

    Building ends with kernels that are compiled and loaded. A process's first build loads cuDNN's libraries too, and
    cuDNN compiles no kernel twice in a process: figures of a fresh process are the ones to quote.
    The workspace is allocated here, and like every tensor used in each run.

    Raises:
        Refused: cuDNN has no engine for this.
    """
    device = outputs[0].tensor.device
    handle = _handle(cudnn, device)
    began = time.perf_counter()
    with _refusals(cudnn):
        graph, execute = {"binding": _bound, "wrapper": _wrapped}[api](cudnn, handle, node, inputs, outputs)
        # Whoever forces cuDNN must not be given another's kernel; None, or no such attribute, is cuDNN itself.
        engine = getattr(graph, "selected_engine", None)
        if engine is not None:
            raise Refused(f"cuDNN has no engine for this, only its front end has ({engine.name})")
        workspace_bytes = int(graph.get_workspace_size())
    build_s = time.perf_counter() - began
    _BUILT.append(graph)
    # At least a byte, since an empty tensor has no address.
    workspace = torch.empty(max(1, workspace_bytes), dtype=torch.uint8, device=device)

    def run() -> None:
        # Timers bring streams of their own, and capturing a CUDA graph does; setting the same one again costs nothing.
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        execute(workspace=workspace, handle=handle)

    return Plan(run, workspace_bytes, build_s)


def _bound(
    cudnn: ModuleType, handle: Any, node: Node, inputs: Mapping[str, Operand], outputs: Sequence[Operand]
) -> tuple[Any, Callable[..., None]]:
    graph = cudnn.pygraph(handle=handle, **_precision(cudnn, outputs))
    variant_pack: dict[int, torch.Tensor] = {}

    def ragged(told: Operand) -> Any:
        if told.ragged_offsets is None:
            return None
        offsets = graph.tensor_like(told.ragged_offsets)
        variant_pack[offsets.get_uid()] = told.ragged_offsets
        return offsets

    given = {}
    for name, told in inputs.items():
        if told.ragged_offsets is None:
            given[name] = graph.tensor_like(told.tensor)
        else:
            given[name] = graph.tensor(
                dim=told.dims, stride=told.strides, data_type=_dtype(cudnn, told), ragged_offset=ragged(told)
            )
        variant_pack[given[name].get_uid()] = told.tensor
    for made, told in _declared(cudnn, node(graph, **given), outputs):
        if told.ragged_offsets is not None:
            made.set_ragged_offset(ragged(told))
        variant_pack[made.get_uid()] = told.tensor
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.deselect_engines(_NOT_CUDNN)
    graph.check_support()
    graph.build_plans()
    return graph, partial(graph.execute, variant_pack)


def _wrapped(
    cudnn: ModuleType, handle: Any, node: Node, inputs: Mapping[str, Operand], outputs: Sequence[Operand]
) -> tuple[Any, Callable[..., None]]:
    given = {name: told.tensor for name, told in inputs.items()}
    buffers: dict[str | int, torch.Tensor] = {f"{NODE}::{name}": tensor for name, tensor in given.items()}
    # The wrapper validates and builds when the block ends, by the same heuristics.
    with cudnn.Graph(handle=handle, workspace_alloc=False, **_precision(cudnn, outputs)) as graph:
        for made, told in _declared(cudnn, node(graph, **given), outputs):
            buffers[made.get_uid()] = told.tensor
    # Called with a dict it writes into the tensors given; called with positions it would allocate outputs each time.
    return graph, partial(graph, buffers)


# The wrapper calls a node's inputs by it: `sdpa::q`.
NODE = "sdpa"


def _declared(cudnn: ModuleType, made: Sequence[Any], outputs: Sequence[Operand]) -> Iterator[tuple[Any, Operand]]:
    for tensor, told in zip([tensor for tensor in made if tensor is not None], outputs, strict=True):
        tensor.set_output(True).set_dim(list(told.dims)).set_stride(list(told.strides))
        tensor.set_data_type(_dtype(cudnn, told))
        yield tensor, told


def _precision(cudnn: ModuleType, outputs: Sequence[Operand]) -> dict[str, Any]:
    single = cudnn.data_type.FLOAT
    return {
        "io_data_type": _dtype(cudnn, outputs[0]),
        "intermediate_data_type": single,
        "compute_data_type": single,
    }


def _dtype(cudnn: ModuleType, told: Operand) -> Any:
    return getattr(cudnn.data_type, _DTYPES[told.tensor.dtype])


@cache
def _handle(cudnn: ModuleType, device: torch.device) -> Any:
    """One handle a device for as long as the process lives: each holds memory and streams."""
    with torch.cuda.device(device):
        return cudnn.create_handle()


@contextmanager
def _refusals(cudnn: ModuleType) -> Iterator[None]:
    try:
        yield
    except cudnn.cudnnGraphNotSupportedError as error:
        raise Refused(_reason(error)) from error
    except RuntimeError as error:
        if _DECLINED.search(str(error)):
            raise Refused(_reason(error)) from error
        raise


def _reason(error: Exception) -> str:
    words = " ".join(str(error).replace("[cudnn_frontend] Error:", "").split())
    return words if len(words) <= _LONGEST_REASON else words[:_LONGEST_REASON] + " ..."
