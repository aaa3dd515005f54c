"""Translate a case for cuDNN (masks as diagonal bands, tensors as operands), and build its graphs into plans.

This module does not import `cudnn`: the caller passes the module in.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.package import Refused
from attn_exp.core.case.case import Case

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
# The wrapper names a node's inputs by it: `sdpa::q`.
NODE = "sdpa"


@dataclass(frozen=True)
class Band:
    """A causal mask as cuDNN's diagonal band.

    Attributes:
        alignment: `TOP_LEFT` or `BOTTOM_RIGHT`.
        kept_keys: the keys inside the left bound, None for all. A left bound L of cuDNN keeps L keys, the query's own
            included (cudnn/sdpa/graph_analyzer.py: window_left = L - 1).
    """

    alignment: str
    kept_keys: int | None = None


def band_of(case: Case) -> Band | None:
    """Return the band of a case; None if no key is hidden, as for the single query of a decode step."""
    if not case.causal:
        return None
    q_len, kv_len = (max(case.lengths),) * 2 if case.lengths else (case.q_len, case.kv_len)
    last_seen = case.offset + q_len - 1  # of the last query
    kept_keys = case.window if case.window is not None and case.window <= last_seen else None
    if kept_keys is None and case.offset >= kv_len - 1:
        return None
    return Band("BOTTOM_RIGHT" if case.offset else "TOP_LEFT", kept_keys)


def mask_options(cudnn: ModuleType, case: Case) -> dict[str, Any]:
    """Return the mask arguments of `sdpa` and `sdpa_backward`, or of their fp8 variants."""
    padded = case.lengths is not None or case.page_size is not None
    options: dict[str, Any] = {"use_padding_mask": True} if padded else {}
    options |= {} if case.page_size is None else {"paged_attention_max_seq_len_kv": case.kv_len}
    band = band_of(case)
    if band is None:
        return options
    # The fp8 nodes name the bounds differently (python/pygraph/sdpa.cpp).
    name = "" if case.quantised else "diagonal_band_"
    options |= {"diagonal_alignment": getattr(cudnn.diagonal_alignment, band.alignment), f"{name}right_bound": 0}
    return options if band.kept_keys is None else options | {f"{name}left_bound": band.kept_keys}


@dataclass(frozen=True)
class Operand:
    """A tensor and how it is declared to the graph: with its own strides, or as sequences at ragged offsets."""

    tensor: torch.Tensor
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    ragged_offsets: torch.Tensor | None = None


def operand(tensor: torch.Tensor) -> Operand:
    """Declare a tensor with its own shape and strides."""
    return Operand(tensor.detach(), tuple(tensor.shape), tuple(tensor.stride()))


def packed_operand(tensor_bhsd: torch.Tensor, lengths: tuple[int, ...]) -> Operand:
    """Declare packed sequences as a batch of padded ones: sequence i starts at element `offsets[i]`.

    The batch stride is not used; the ragged offsets locate each sequence.
    """
    _, heads, _, dim = tensor_bhsd.shape
    _, head_stride, token_stride, _ = tensor_bhsd.stride()
    longest = max(lengths)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=tensor_bhsd.device)
    return Operand(
        tensor_bhsd.detach(),
        (len(lengths), heads, longest, dim),
        (heads * longest * dim, head_stride, token_stride, 1),
        (starts * token_stride).reshape(-1, 1, 1, 1),
    )


def operand_of(case: Case, tensor_bhsd: torch.Tensor) -> Operand:
    """Declare a case's tensor, packed or not."""
    return operand(tensor_bhsd) if case.lengths is None else packed_operand(tensor_bhsd, case.lengths)


def paged_operands(case: Case, inputs: Inputs) -> dict[str, Operand]:
    """Declare the pools of a paged cache as (pages, kv_heads, page_size, dim), its block table and its lengths."""
    assert inputs.paging is not None
    device = inputs.q_bhsd.device
    table = operand(inputs.paging.pages.table[:, None, :, None].contiguous())
    lengths = {"seq_len_q": case.q_len, "seq_len_kv": case.kv_len}
    return {
        "k": operand(inputs.k_bhsd.transpose(1, 2)),
        "v": operand(inputs.v_bhsd.transpose(1, 2)),
        "paged_attention_k_table": table,
        "paged_attention_v_table": table,
        **{
            name: operand(torch.full((case.batch, 1, 1, 1), length, dtype=torch.int32, device=device))
            for name, length in lengths.items()
        },
    }


def room_for_stats(case: Case, device: torch.device) -> torch.Tensor:
    """Allocate the softmax statistics, float32 (batch, q_heads, q_len, 1).

    The batch of a packed case is its sequences, padded to the longest.
    """
    batch, q_len = (case.batch, case.q_len) if case.lengths is None else (len(case.lengths), max(case.lengths))
    return torch.empty(batch, case.q_heads, q_len, 1, dtype=torch.float32, device=device)


def sequence_lengths(case: Case, device: torch.device) -> dict[str, Operand]:
    """Return the lengths of packed sequences, int32 (sequences, 1, 1, 1), of queries and keys.

    Empty if not packed.
    """
    if case.lengths is None:
        return {}
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device).reshape(-1, 1, 1, 1)
    return {"seq_len_q": operand(lengths), "seq_len_kv": operand(lengths)}


def backward_options(case: Case, *, deterministic: bool) -> dict[str, Any]:
    """Return the arguments that only the backward has."""
    options: dict[str, Any] = {"use_deterministic_algorithm": True} if deterministic else {}
    if case.lengths is not None:
        # Otherwise the workspace is sized as if every sequence were as long as the longest.
        options |= {"max_total_seq_len_q": case.q_len, "max_total_seq_len_kv": case.kv_len}
    return options


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


def node_of(kind: str, **options: Any) -> Node:
    """Return the function that adds a node of this kind to a graph, and returns its outputs."""
    return lambda graph, **tensors: getattr(graph, kind)(name=NODE, **options, **tensors)


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
