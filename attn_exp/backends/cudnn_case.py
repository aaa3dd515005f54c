"""Translate a case for cuDNN: masks as diagonal bands, tensors as graph operands."""

from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import Case


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
