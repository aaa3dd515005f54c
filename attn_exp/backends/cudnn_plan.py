"""Build cuDNN's attention graphs into plans that are ready to run.

This module does not import `cudnn`: the caller passes the module in.
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

# Maps an unbuilt graph and its inputs by name to the graph's output tensors; None for an output that it does not make.
Node = Callable[..., Sequence[Any]]

_DTYPES = {
    torch.float16: "HALF",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
    torch.int32: "INT32",
    torch.float8_e4m3fn: "FP8_E4M3",
}
# cudnn-frontend 1.32 has attention kernels of its own in Python (CuTe DSL) and may rank them before cuDNN's
# (cudnn/sdpa/fwd/placement.py). Their names begin with these prefixes, those of cuDNN's engines with `eng`.
_NOT_CUDNN = ["sdpa_fwd_", "sdpa_bwd_"]
# cuDNN's messages for a missing kernel, as opposed to a failure.
_DECLINED = re.compile(r"no valid (engine|execution)|not[_ ]supported|no engine", re.IGNORECASE)
_LONGEST_REASON = 300
# Keep every built graph, about 1 MiB of host memory each. A freed graph unloads its kernels, others are loaded at the
# same addresses, and CUPTI reports them under the old names. On an H200 (torch 2.11, CUDA 13.0, cuDNN 9.19), 5 of 48
# kernels had another kernel's name; with the graphs kept, none had.
_BUILT: list[Any] = []


@dataclass(frozen=True)
class Plan:
    """A built graph.

    Attributes:
        run: runs it on the current stream.
        workspace_bytes: the size of its workspace.
        build_s: the seconds that building took.
    """

    run: Callable[[], None]
    workspace_bytes: int
    build_s: float

    def notes(self, direction: str) -> dict[str, float]:
        """Return the figures for the record."""
        return {
            f"{direction}_workspace_bytes": float(self.workspace_bytes),
            f"{direction}_build_s": round(self.build_s, 6),
        }


def build(cudnn: ModuleType, api: str, node: Node, inputs: Mapping[str, Operand], outputs: Sequence[Operand]) -> Plan:
    """Build the graph of one node with the binding API (`binding`) or through `cudnn.Graph` (`wrapper`).

    The build includes compiling and loading kernels. The first build of a process also loads cuDNN's libraries, and
    cuDNN compiles no kernel twice in a process. So quote build times of a fresh process. The workspace is allocated
    here and used in each run, as are all tensors. Raises Refused if cuDNN has no engine for this graph.
    """
    device = outputs[0].tensor.device
    handle = _handle(cudnn, device)
    began = time.perf_counter()
    with _refusals(cudnn):
        graph, execute = {"binding": _bound, "wrapper": _wrapped}[api](cudnn, handle, node, inputs, outputs)
        # A backend that forces cuDNN must not run another library's kernel. None or a missing attribute is cuDNN
        # itself.
        engine = getattr(graph, "selected_engine", None)
        if engine is not None:
            raise Refused(f"cuDNN has no engine for this, only its front end has ({engine.name})")
        workspace_bytes = int(graph.get_workspace_size())
    build_s = time.perf_counter() - began
    _BUILT.append(graph)
    # At least one byte: an empty tensor has no address.
    workspace = torch.empty(max(1, workspace_bytes), dtype=torch.uint8, device=device)

    def run() -> None:
        # Timers and CUDA graph capture use streams of their own. Setting the same stream again costs nothing.
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        execute(workspace=workspace, handle=handle)

    return Plan(run, workspace_bytes, build_s)


def _bound(
    cudnn: ModuleType, handle: Any, node: Node, inputs: Mapping[str, Operand], outputs: Sequence[Operand]
) -> tuple[Any, Callable[..., None]]:
    graph = cudnn.pygraph(handle=handle, **_precision(cudnn, outputs))
    variant_pack: dict[int, torch.Tensor] = {}

    def ragged(operand: Operand) -> Any:
        if operand.ragged_offsets is None:
            return None
        offsets = graph.tensor_like(operand.ragged_offsets)
        variant_pack[offsets.get_uid()] = operand.ragged_offsets
        return offsets

    tensors = {}
    for name, operand in inputs.items():
        if operand.ragged_offsets is None:
            tensors[name] = graph.tensor_like(operand.tensor)
        else:
            tensors[name] = graph.tensor(
                dim=operand.dims,
                stride=operand.strides,
                data_type=_dtype(cudnn, operand),
                ragged_offset=ragged(operand),
            )
        variant_pack[tensors[name].get_uid()] = operand.tensor
    for tensor, operand in _declared(cudnn, node(graph, **tensors), outputs):
        if operand.ragged_offsets is not None:
            tensor.set_ragged_offset(ragged(operand))
        variant_pack[tensor.get_uid()] = operand.tensor
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
    tensors = {name: operand.tensor for name, operand in inputs.items()}
    buffers: dict[str | int, torch.Tensor] = {f"{NODE}::{name}": tensor for name, tensor in tensors.items()}
    # The wrapper validates and builds when the block ends, with the same heuristics.
    with cudnn.Graph(handle=handle, workspace_alloc=False, **_precision(cudnn, outputs)) as graph:
        for tensor, operand in _declared(cudnn, node(graph, **tensors), outputs):
            buffers[tensor.get_uid()] = operand.tensor
    # Called with a dict it writes into the given tensors; with positional arguments it would allocate outputs at each
    # call.
    return graph, partial(graph, buffers)


# The wrapper names a node's inputs by it: `sdpa::q`.
NODE = "sdpa"


def _declared(cudnn: ModuleType, nodes: Sequence[Any], outputs: Sequence[Operand]) -> Iterator[tuple[Any, Operand]]:
    for tensor, operand in zip([tensor for tensor in nodes if tensor is not None], outputs, strict=True):
        tensor.set_output(True).set_dim(list(operand.dims)).set_stride(list(operand.strides))
        tensor.set_data_type(_dtype(cudnn, operand))
        yield tensor, operand


def _precision(cudnn: ModuleType, outputs: Sequence[Operand]) -> dict[str, Any]:
    single = cudnn.data_type.FLOAT
    return {"io_data_type": _dtype(cudnn, outputs[0]), "intermediate_data_type": single, "compute_data_type": single}


def _dtype(cudnn: ModuleType, operand: Operand) -> Any:
    return getattr(cudnn.data_type, _DTYPES[operand.tensor.dtype])


@cache
def _handle(cudnn: ModuleType, device: torch.device) -> Any:
    """Return the process's handle of a device. Each handle holds memory and streams, so there is only one."""
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
