"""What a case is in cuDNN's words: masks as diagonal bands, and tensors as its graphs are told of them."""

from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from attn_exp.core.case import Case


@dataclass(frozen=True)
class Band:
    """A causal mask as cuDNN's diagonal band: how it is aligned, and the keys that its left bound keeps, None for all.

    cuDNN's left bound L keeps L keys, the query's own included (cudnn/sdpa/graph_analyzer.py: window_left = L - 1).
    """

    alignment: str
    kept_keys: int | None = None


def band_of(case: Case) -> Band | None:
    """The band of a case; None if no key is hidden, as from the one query of a decode step."""
    if not case.causal:
        return None
    q_len, kv_len = (max(case.lengths),) * 2 if case.lengths else (case.q_len, case.kv_len)
    last_seen = case.offset + q_len - 1  # by the last query
    kept_keys = case.window if case.window is not None and case.window <= last_seen else None
    if kept_keys is None and case.offset >= kv_len - 1:
        return None
    return Band("BOTTOM_RIGHT" if case.offset else "TOP_LEFT", kept_keys)


def mask_options(cudnn: ModuleType, case: Case) -> dict[str, Any]:
    """The arguments of `sdpa` and `sdpa_backward` that say a case's mask, or of the two for fp8."""
    options: dict[str, Any] = {} if case.lengths is None else {"use_padding_mask": True}
    band = band_of(case)
    if band is None:
        return options
    # The bounds have other names at fp8 (python/pygraph/sdpa.cpp).
    name = "" if case.quantised else "diagonal_band_"
    options |= {"diagonal_alignment": getattr(cudnn.diagonal_alignment, band.alignment), f"{name}right_bound": 0}
    return options if band.kept_keys is None else options | {f"{name}left_bound": band.kept_keys}


@dataclass(frozen=True)
class Operand:
    """A tensor of memory, and how the graph is told that it lies: as it does, or as sequences at ragged offsets."""

    tensor: torch.Tensor
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    ragged_offsets: torch.Tensor | None = None


def operand(tensor: torch.Tensor) -> Operand:
    """A tensor as it lies."""
    return Operand(tensor.detach(), tuple(tensor.shape), tuple(tensor.stride()))


def packed_operand(tensor_bhsd: torch.Tensor, lengths: tuple[int, ...]) -> Operand:
    """A row of packed sequences as a batch of padded ones: sequence i begins `offsets[i]` elements into the memory.

    The stride over the batch is never used; what lies between two sequences is their ragged offsets' difference.
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


def told(case: Case, tensor_bhsd: torch.Tensor) -> Operand:
    """A tensor of a case, as it lies or as its packed sequences."""
    return operand(tensor_bhsd) if case.lengths is None else packed_operand(tensor_bhsd, case.lengths)


def room_for_stats(case: Case, device: torch.device) -> torch.Tensor:
    """Room for the softmax statistics (batch, q_heads, q_len, 1), by padded sequences where they are packed."""
    batch, q_len = (case.batch, case.q_len) if case.lengths is None else (len(case.lengths), max(case.lengths))
    return torch.empty(batch, case.q_heads, q_len, 1, dtype=torch.float32, device=device)


def sequence_lengths(case: Case, device: torch.device) -> dict[str, Operand]:
    """How long each of the packed sequences is: (sequences, 1, 1, 1), for queries and for keys."""
    if case.lengths is None:
        return {}
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device).reshape(-1, 1, 1, 1)
    return {"seq_len_q": operand(lengths), "seq_len_kv": operand(lengths)}


def backward_options(case: Case, *, deterministic: bool) -> dict[str, Any]:
    """The arguments that the backward alone has."""
    options: dict[str, Any] = {"use_deterministic_algorithm": True} if deterministic else {}
    if case.lengths is not None:
        # Else the workspace is as large as if every sequence were as long as the longest.
        options |= {"max_total_seq_len_q": case.q_len, "max_total_seq_len_kv": case.kv_len}
    return options
